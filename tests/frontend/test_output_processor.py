"""The loop over a step's rows: offsets, unknown ids, merging, slow callers; without any transport."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.logprobs import LogprobsProcessor
from frontend_svc.output_processor import OutputProcessor
from frontend_svc.outputs import OutputKind, RequestOutput
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.request_state import RequestState
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import AbortReason, Finished, FinishReason, LogprobColumns, StepOutputs
from pagewire.errors import DeadlineExceededError, InternalError, ResourceExhaustedError, UnavailableError
from pagewire.sampling import SamplingParams


def step(
    *rows: tuple[int, int, list[int]],
    finished: list[Finished] | None = None,
    logprobs: dict[int, LogprobColumns] | None = None,
) -> StepOutputs:
    """Outputs of (request id, offset, tokens) rows."""
    return StepOutputs(
        step=1,
        request_ids=np.array([row[0] for row in rows], np.uint64),
        offsets=np.array([row[1] for row in rows], np.int32),
        num_tokens=np.array([len(row[2]) for row in rows], np.int32),
        token_ids=np.array([token for row in rows for token in row[2]], np.int32),
        finished=finished or [],
        logprobs=logprobs or {},
    )


def register(
    processor: OutputProcessor,
    tokenizer: Tokenizer,
    request_ids: list[int],
    kind: OutputKind = OutputKind.DELTA,
    **params: object,
) -> ParentRequest:
    parent = ParentRequest(f"external-{request_ids[0]}", [5, 6], kind)
    resolved = SamplingParams(**params)  # type: ignore[arg-type]
    for index, request_id in enumerate(request_ids):
        parent.add_child(
            RequestState(request_id, index, resolved, [5, 6], tokenizer, is_delta=kind is OutputKind.DELTA)
        )
    processor.add(parent)
    return parent


def take(parent: ParentRequest) -> RequestOutput:
    assert parent.is_ready
    return parent.take_ready()


def test_unknown_ids_are_counted_and_ignored(smollm2: Tokenizer) -> None:
    """Late rows and finishes for requests that nobody has harm nobody.

    Case: vllm#43226
    """
    processor = OutputProcessor()
    parent = register(processor, smollm2, [1])
    outputs = step((99, 0, [4]), (1, 0, [504]), (98, 7, []), finished=[Finished(2, FinishReason.ABORT)])
    assert processor.process_outputs(outputs) == {}
    assert processor.num_unknown_ids == 2
    assert take(parent).outputs[0].token_ids == [504]


def test_duplicates_are_dropped(smollm2: Tokenizer) -> None:
    """What a core sends again after a reconnect counts once, log-probabilities too."""
    processor = OutputProcessor()
    parent = register(processor, smollm2, [1], logprobs=0)
    ids = smollm2.encode("one two three four five six")[:6]

    def columns(start: int, stop: int) -> LogprobColumns:
        values = np.arange(start, stop, dtype=np.float32).reshape(-1, 1)
        return LogprobColumns(
            np.array(ids[start:stop], np.int32).reshape(-1, 1), -values, np.ones(stop - start, np.int32)
        )

    for start, stop in ((0, 2), (0, 4), (3, 4), (2, 6)):
        assert processor.process_outputs(step((1, start, ids[start:stop]), logprobs={0: columns(start, stop)})) == {}
    output = take(parent).outputs[0]
    assert output.token_ids == ids
    assert output.logprobs is not None
    assert [next(iter(p.values())).logprob for p in output.logprobs] == [0, -1, -2, -3, -4, -5]
    assert output.cumulative_logprob == -15


def test_a_gap_fails_that_request_alone(smollm2: Tokenizer) -> None:
    processor = OutputProcessor()
    broken, sound = register(processor, smollm2, [1, 2]), register(processor, smollm2, [3])
    processor.process_outputs(step((1, 0, [504]), (2, 0, [504]), (3, 0, [504])))
    aborts = processor.process_outputs(step((1, 5, [504]), (2, 1, [504]), (3, 1, [504])))
    assert {reason: sorted(ids) for reason, ids in aborts.items()} == {AbortReason.SIBLING_FAILED: [1, 2]}
    with pytest.raises(InternalError, match="lost"):
        take(broken)
    assert take(sound).outputs[0].token_ids == [504, 504]
    assert len(processor) == 1


def test_a_fault_in_one_row_fails_one_request(smollm2: Tokenizer) -> None:
    """Even a fault of ours in one row ends one request and not the stream of all.

    Case: vllm#17448
    """
    processor = OutputProcessor()
    broken, sound = register(processor, smollm2, [1]), register(processor, smollm2, [2])
    broken.children[0]._assembler = None  # type: ignore[assignment]
    aborts = processor.process_outputs(step((1, 0, [504]), (2, 0, [504, 2**31 - 1, -5])))
    assert aborts == {AbortReason.SIBLING_FAILED: [1]}
    with pytest.raises(InternalError):
        take(broken)
    assert take(sound).outputs[0].token_ids == [504, 2**31 - 1, -5]


def test_how_a_finish_of_the_core_looks_to_the_caller(smollm2: Tokenizer) -> None:
    def finish(finished: Finished) -> RequestOutput:
        processor = OutputProcessor()
        parent = register(processor, smollm2, [1])
        processor.process_outputs(step((1, 0, []), finished=[finished]))
        assert len(processor) == 0
        return take(parent)

    assert finish(Finished(0, FinishReason.LENGTH)).outputs[0].finish_reason is FinishReason.LENGTH
    paused = Finished(0, FinishReason.ABORT, abort_reason=AbortReason.PAUSE)
    assert finish(paused).outputs[0].finish_reason is FinishReason.ABORT
    with pytest.raises(DeadlineExceededError):
        finish(Finished(0, FinishReason.DEADLINE))
    with pytest.raises(UnavailableError, match="worker"):
        finish(Finished(0, FinishReason.ERROR, error_code="UNAVAILABLE", error_message="no worker"))
    with pytest.raises(InternalError):
        finish(Finished(0, FinishReason.ERROR, error_code="DATA_LOSS"))
    with pytest.raises(UnavailableError):
        finish(Finished(0, FinishReason.ABORT, abort_reason=AbortReason.SHUTDOWN))


def test_one_end_wins(smollm2: Tokenizer) -> None:
    """After an abort nothing changes the result, and after the end an abort changes nothing.

    Case: smg#1351
    """
    processor = OutputProcessor()
    parent = register(processor, smollm2, [1])
    processor.process_outputs(step((1, 0, [504])))
    assert processor.abort(parent, AbortReason.CLIENT) == {AbortReason.CLIENT: [1]}
    assert processor.abort(parent, AbortReason.CLIENT) == {}
    processor.process_outputs(step((1, 1, [504]), finished=[Finished(0, FinishReason.LENGTH)]))
    parent.fail(InternalError("late"))
    output = take(parent)
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert output.usage is not None
    assert output.usage.num_completion_tokens == 1


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from([OutputKind.DELTA, OutputKind.CUMULATIVE]))
def test_a_late_reader_gets_everything_merged(smollm2: Tokenizer, data: st.DataObject, kind: OutputKind) -> None:
    """However seldom the caller reads, what it gets adds up to the same, with no empty message before the last."""
    processor = OutputProcessor()
    parent = register(processor, smollm2, [1, 2], kind)
    tokens = {request_id: data.draw(st.lists(st.integers(0, 49151), min_size=1, max_size=12)) for request_id in (1, 2)}
    sent, texts, ids = {1: 0, 2: 0}, ["", ""], [[], []]  # type: ignore[var-annotated]

    def read() -> bool:
        output = parent.take()
        for completion in output.outputs:
            assert completion.text or output.finished or completion.finish_reason
            if kind is OutputKind.CUMULATIVE:
                assert completion.text.startswith(texts[completion.index])
                texts[completion.index], ids[completion.index] = "", []
            texts[completion.index] += completion.text
            ids[completion.index] += completion.token_ids
        return output.finished

    while any(sent[r] < len(tokens[r]) for r in tokens):
        request_id = data.draw(st.sampled_from([r for r in tokens if sent[r] < len(tokens[r])]))
        count = data.draw(st.integers(1, 3))
        start = sent[request_id]
        sent[request_id] = min(start + count, len(tokens[request_id]))
        is_last = sent[request_id] == len(tokens[request_id])
        finished = [Finished(0, FinishReason.LENGTH)] if is_last else []
        row = (request_id, start, tokens[request_id][start : sent[request_id]])
        assert processor.process_outputs(step(row, finished=finished)) == {}
        if parent.is_ready and data.draw(st.booleans()):
            read()
    if not parent.has_ended:
        assert read()
    for index, request_id in enumerate((1, 2)):
        assert ids[index] == tokens[request_id]
        assert texts[index] == smollm2.decode(tokens[request_id], skip_special_tokens=True)


def test_a_caller_too_far_behind_is_cut_off(smollm2: Tokenizer) -> None:
    processor = OutputProcessor(max_tokens_behind=10)
    slow, final = register(processor, smollm2, [1]), register(processor, smollm2, [2], OutputKind.FINAL_ONLY)
    for offset in range(30):
        aborts = processor.process_outputs(step((1, offset, [504]), (2, offset, [504])))
        if aborts:
            break
    assert (offset, aborts) == (11, {AbortReason.SLOW_CONSUMER: [1]})
    with pytest.raises(ResourceExhaustedError, match="behind"):
        take(slow)
    assert not final.is_finished


def test_logprob_texts_are_repaired(smollm2: Tokenizer) -> None:
    """A character over several tokens shows once, whole, at the token that completes it."""
    ids = smollm2.encode("a🜁é日b")
    processor = LogprobsProcessor(smollm2, 1)
    rivals = [smollm2.encode("x")[0]] * len(ids)
    columns = LogprobColumns(
        np.array([ids, rivals], np.int32).T,
        np.full((len(ids), 2), -1.0, np.float32),
        np.full(len(ids), 2, np.int32),
    )
    positions = processor.update(columns)
    assert "".join(position[i].decoded_token for position, i in zip(positions, ids, strict=True)) == "a🜁é日b"
    assert {position[rivals[0]].decoded_token for position in positions} == {"x"}
    for position, token_id in zip(positions, ids, strict=True):
        assert list(position) == [token_id, rivals[0]]
        assert (position[token_id].rank, position[rivals[0]].rank) == (2, 1)
