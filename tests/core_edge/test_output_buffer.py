"""OutputBuffer and the functions below it: nothing lost, nothing twice, bounded memory."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_svc import output_buffer
from core_svc.merge_outputs import empty_outputs, merge, missing_part, outputs_bytes
from core_svc.output_buffer import OutputBuffer
from pagewire.engine import CoreStats, Finished, FinishReason, LogprobColumns, StepOutputs


def outputs(step: int, rows: list[tuple[int, int, list[int]]], finished: tuple[int, ...] = ()) -> StepOutputs:
    """rows: (request id, offset, tokens); finished: row numbers."""
    return StepOutputs(
        step=step,
        request_ids=np.array([r[0] for r in rows], np.uint64),
        offsets=np.array([r[1] for r in rows], np.int32),
        num_tokens=np.array([len(r[2]) for r in rows], np.int32),
        token_ids=np.array([token for r in rows for token in r[2]], np.int32),
        finished=[Finished(row, FinishReason.LENGTH) for row in finished],
    )


def logprobs(token_ids: list[int]) -> LogprobColumns:
    ids = np.array(token_ids, np.int32).reshape(-1, 1)
    return LogprobColumns(ids, -ids.astype(np.float32), np.ones(len(token_ids), np.int32))


class Reader:
    """What a frontend does: appends tokens at their offsets and complains about gaps and repeats."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finished: dict[int, int] = {}
        self.sequence = 0

    def receive(self, message: StepOutputs) -> None:
        assert message.sequence == self.sequence + 1
        self.sequence = message.sequence
        starts = np.cumsum(message.num_tokens) - message.num_tokens
        for row, request_id in enumerate(message.request_ids.tolist()):
            mine = self.tokens.setdefault(request_id, [])
            new = message.token_ids[starts[row] : starts[row] + message.num_tokens[row]].tolist()
            assert not new or int(message.offsets[row]) == len(mine), "a gap or a repeat"
            mine.extend(new)
            if row in message.logprobs:
                assert message.logprobs[row].token_ids[:, 0].tolist() == new
                self.logprobs.setdefault(request_id, []).extend(message.logprobs[row].logprobs[:, 0].tolist())
        for entry in message.finished:
            request_id = int(message.request_ids[entry.row])
            self.finished[request_id] = self.finished.get(request_id, 0) + 1

    def drain(self, buffer: OutputBuffer) -> None:
        while (message := buffer.take()) is not None:
            self.receive(message)


def test_sequence_numbers_and_merging_under_pressure() -> None:
    buffer = OutputBuffer()
    buffer.register([7])
    reader = Reader()
    for step in range(5):
        buffer.append(outputs(step, [(7, step, [100 + step])]))
    first = buffer.take()
    assert first is not None
    assert (first.sequence, first.step, first.num_tokens.tolist()) == (1, 4, [1] * 5)
    reader.receive(first)
    assert buffer.take() is None
    buffer.append(outputs(5, [(7, 5, [105])], finished=(0,)))
    reader.drain(buffer)
    assert reader.tokens == {7: [100, 101, 102, 103, 104, 105]}
    assert reader.finished == {7: 1}
    assert (buffer.num_live, buffer.has_pending) == (0, False)


def test_merge_shifts_rows_of_everything_sparse() -> None:
    a = outputs(1, [(1, 0, [10]), (2, 0, [20, 21])], finished=(1,))
    a.started = {0: 3}
    a.logprobs = {1: logprobs([20, 21])}
    b = outputs(2, [(3, 4, [30]), (1, 1, [11])], finished=(0,))
    b.prompt_logprobs = {1: (5, logprobs([1, 2]))}
    b.started = {0: 8}
    b.stats = CoreStats(num_steps=2)
    merged = merge([a, b])
    assert merged.request_ids.tolist() == [1, 2, 3, 1]
    assert merged.token_ids.tolist() == [10, 20, 21, 30, 11]
    assert [f.row for f in merged.finished] == [1, 2]
    assert merged.started == {0: 3, 2: 8}
    assert list(merged.logprobs) == [1]
    assert merged.prompt_logprobs[3][0] == 5
    assert merged.stats is not None and merged.stats.num_steps == 2
    assert [f.row for f in b.finished] == [0], "the parts must stay as they are"


def test_merged_messages_stay_below_the_merge_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_buffer, "MERGE_BYTES", 5000)
    buffer = OutputBuffer()
    buffer.register([1])
    for step in range(1000):
        buffer.append(outputs(step, [(1, step, [step])]))
    reader = Reader()
    sizes = []
    while (message := buffer.take()) is not None:
        sizes.append(outputs_bytes(message))
        reader.receive(message)
    assert reader.tokens[1] == list(range(1000))
    assert max(sizes) <= 5000
    assert len(sizes) < 100


def test_a_reader_that_never_reads_overflows_at_the_limit() -> None:
    """The queue of a slow reader is bounded, and says when it is full."""
    buffer = OutputBuffer(max_bytes=100_000)
    buffer.register([1])
    accepted = 0
    for step in range(10_000):
        if not buffer.append(outputs(step, [(1, step * 100, list(range(100)))])):
            break
        accepted += 1
    assert buffer.has_overflowed
    assert 100 < accepted < 300
    assert buffer.num_bytes < 110_000
    assert not buffer.append(outputs(0, [(1, 0, [1])]))


def test_a_reader_that_never_acknowledges_costs_bounded_memory() -> None:
    buffer = OutputBuffer(max_bytes=100_000)
    buffer.register([1, 2])
    reader = Reader()
    for step in range(5000):
        buffer.append(outputs(step, [(1, step, [step])]))
        reader.drain(buffer)
        assert buffer.num_bytes < 110_000
    assert reader.tokens[1] == list(range(5000))
    # What was forgotten can't be sent again: the request counts as unknown to a frontend that lacks it.
    assert buffer.reopen({1: 10, 2: 0}) == ([1], [1])
    assert buffer.reopen({1: 5000, 2: 0}) == ([], [])


def test_reopen_names_unknown_and_unwanted_requests() -> None:
    buffer = OutputBuffer()
    buffer.register([1, 2, 3])
    buffer.append(outputs(1, [(1, 0, [5]), (2, 0, [6])], finished=(1,)))
    buffer.take()
    assert buffer.reopen({1: 0, 2: 1, 99: 4}) == ([99], [3])
    again = buffer.take()
    assert again is not None
    assert again.request_ids.tolist() == [1, 2]
    assert again.token_ids.tolist() == [5]
    assert [f.row for f in again.finished] == [1]


def test_acknowledged_requests_are_forgotten() -> None:
    buffer = OutputBuffer()
    buffer.register([1, 2])
    buffer.append(outputs(1, [(1, 0, [5]), (2, 0, [6])], finished=(0, 1)))
    message = buffer.take()
    assert message is not None
    buffer.acknowledge(0, finished_request_ids=[1])
    assert buffer.reopen({1: 1, 2: 1}) == ([1], [])
    message = buffer.take()
    assert message is not None and message.request_ids.tolist() == [2]
    buffer.acknowledge(message.sequence)
    assert buffer.reopen({2: 1}) == ([2], [])
    assert buffer.num_bytes == 0


def test_register_and_unregister() -> None:
    buffer = OutputBuffer()
    assert buffer.register([1, 2]) == [1, 2]
    assert buffer.register([2, 3]) == [3]
    buffer.unregister([3])
    assert buffer.num_live == 2


def test_stats_alone_are_sent_and_not_kept() -> None:
    buffer = OutputBuffer()
    buffer.append(empty_outputs(3, CoreStats(num_running=1)))
    message = buffer.take()
    assert message is not None and message.stats == CoreStats(num_running=1) and message.sequence == 1
    assert buffer.num_bytes == 0


def test_missing_part_cuts_inside_a_row() -> None:
    full = outputs(1, [(1, 4, [10, 11, 12])])
    full.logprobs = {0: logprobs([10, 11, 12])}
    part = missing_part(full, {1: 6})
    assert part is not None
    assert (part.offsets.tolist(), part.token_ids.tolist()) == ([6], [12])
    assert part.logprobs[0].token_ids.tolist() == [[12]]
    assert missing_part(full, {1: 7}) is None
    assert missing_part(full, {2: 0}) is None


operation = st.one_of(
    st.tuples(st.just("step"), st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), st.integers(0, 3)),
    st.tuples(st.just("read"), st.integers(1, 3)),
    st.tuples(st.just("acknowledge")),
    st.tuples(st.just("break"), st.integers(0, 3)),
)


@given(st.lists(operation, max_size=80))
def test_every_token_once_whatever_breaks(operations: list[tuple[object, ...]]) -> None:
    """Random steps, reads, acknowledgements and breaks (which lose messages in flight): each token arrives once."""
    buffer = OutputBuffer()
    written: dict[int, int] = {}
    ended: set[int] = set()
    reader = Reader()
    buffer.register(range(5))
    for step, (name, *arguments) in enumerate(operations):
        if name == "step":
            ids, num_tokens = arguments
            rows = []
            for i in [i for i in ids if i not in ended]:  # type: ignore[attr-defined]
                rows.append((i, written.get(i, 0), [1000 * i + written.get(i, 0) + k for k in range(num_tokens)]))  # type: ignore[call-overload]
                written[i] = written.get(i, 0) + num_tokens  # type: ignore[operator]
            done = tuple(row for row, (i, _, _) in enumerate(rows) if written[i] > 8)
            ended.update(rows[row][0] for row in done)
            message = outputs(step, rows, done)
            message.logprobs = {row: logprobs(tokens) for row, (_, _, tokens) in enumerate(rows) if tokens}
            buffer.append(message)
        elif name == "read":
            for _ in range(arguments[0]):  # type: ignore[call-overload]
                message_or_none = buffer.take()
                if message_or_none is not None:
                    reader.receive(message_or_none)
        elif name == "acknowledge":
            buffer.acknowledge(reader.sequence)
        else:
            # Messages taken for the stream that never reach the reader.
            for _ in range(arguments[0]):  # type: ignore[call-overload]
                lost = buffer.take()
                reader.sequence += lost is not None
            wanted = {i: len(reader.tokens.get(i, [])) for i in range(5) if i not in reader.finished}
            unknown, unwanted = buffer.reopen(wanted)
            assert (unknown, unwanted) == ([], [])
    wanted = {i: len(reader.tokens.get(i, [])) for i in range(5) if i not in reader.finished}
    buffer.reopen(wanted)
    reader.drain(buffer)
    for i in range(5):
        assert reader.tokens.get(i, []) == [1000 * i + k for k in range(written.get(i, 0))]
        assert reader.logprobs.get(i, []) == [-float(1000 * i + k) for k in range(written.get(i, 0))]
    assert reader.finished == dict.fromkeys(ended, 1)


def test_a_reopen_that_names_very_many_requests_takes_time_in_proportion() -> None:
    """The event loop of all frontends waits for it: one set per named request would take minutes."""
    buffer = OutputBuffer()
    buffer.register([7])
    started_s = time.monotonic()
    unknown, unwanted = buffer.reopen(dict.fromkeys(range(65_536), 0))
    assert time.monotonic() - started_s < 5
    assert len(unknown) == 65_535 and 7 not in unknown and unwanted == []
