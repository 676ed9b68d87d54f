"""The outbox: one write at a time per call, merged deltas for a slow reader, several steps merged when behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from frontend_support import run

from frontend_svc.outbox import Outbox, ResponseWriter
from frontend_svc.output_processor import OutputProcessor
from frontend_svc.outputs import OutputKind, RequestOutput
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.request_state import RequestState
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import Finished, FinishReason, LogprobColumns, StepOutputs
from pagewire.errors import InternalError
from pagewire.sampling import SamplingParams


class Reader:
    """A call whose writes complete when the test says so."""

    def __init__(self, is_slow: bool = False) -> None:
        self.sent: list[RequestOutput] = []
        self.gate = asyncio.Semaphore(0)
        self.is_slow = is_slow
        self.num_writing = 0
        self.error: Exception | None = None

    def write(self, output: RequestOutput) -> Coroutine[Any, Any, None]:
        async def writing() -> None:
            self.sent.append(output)
            self.num_writing += 1
            assert self.num_writing == 1, "two writes of one call at once"
            if self.is_slow:
                await self.gate.acquire()
            self.num_writing -= 1
            if self.error is not None:
                raise self.error

        return writing()

    @property
    def token_ids(self) -> list[int]:
        return [i for output in self.sent for completion in output.outputs for i in completion.token_ids]

    @property
    def text(self) -> str:
        return "".join(completion.text for output in self.sent for completion in output.outputs)


class Call:
    """A request of one completion and its writer."""

    def __init__(
        self, request_id: int, processor: OutputProcessor, outbox: Outbox, tokenizer: Tokenizer, reader: Reader
    ) -> None:
        self.reader = reader
        self.parent = ParentRequest(f"r{request_id}", [5, 6], OutputKind.DELTA)
        params = SamplingParams(logprobs=0)
        self.parent.add_child(RequestState(request_id, 0, params, [5, 6], tokenizer, is_delta=True))
        processor.add(self.parent)
        self.task = asyncio.create_task(ResponseWriter(self.parent, reader.write, outbox).run())


def step(offset: int, rows: dict[int, int], *, is_last: bool = False) -> StepOutputs:
    """One token for each request; its log-probability is minus its place."""
    ones = np.ones(len(rows), np.int32)
    columns = {
        row: LogprobColumns(np.array([[token]], np.int32), np.array([[-offset]], np.float32), np.ones(1, np.int32))
        for row, token in enumerate(rows.values())
    }
    outputs = StepOutputs(
        step=offset + 1,
        request_ids=np.array(list(rows), np.uint64),
        offsets=ones * offset,
        num_tokens=ones,
        token_ids=np.array(list(rows.values()), np.int32),
        logprobs=columns,
    )
    if is_last:
        outputs.finished = [Finished(row, FinishReason.LENGTH) for row in range(len(rows))]
    return outputs


def test_a_slow_reader_gets_merged_deltas_with_everything_in_them(smollm2: Tokenizer) -> None:
    """Beside a fast reader, who gets a message per step; every token has its own log-probability, in order."""

    async def scenario() -> None:
        processor, outbox = OutputProcessor(), Outbox()
        slow = Call(1, processor, outbox, smollm2, Reader(is_slow=True))
        fast = Call(2, processor, outbox, smollm2, Reader())
        await asyncio.sleep(0)
        ids = smollm2.encode("one two three four five six seven eight nine ten eleven twelve")[:12]
        for place, token in enumerate(ids):
            processor.process_outputs(step(place, {1: token, 2: token}, is_last=place == len(ids) - 1))
            outbox._not_before = 0.0
            outbox.flush()
            if place == 5:
                slow.reader.gate.release()
                await asyncio.sleep(0.01)
        assert [len(output.outputs[0].token_ids) for output in slow.reader.sent] == [1, 5]
        for _ in range(2):
            slow.reader.gate.release()
        await asyncio.wait_for(asyncio.gather(slow.task, fast.task), 5)
        assert [len(output.outputs[0].token_ids) for output in slow.reader.sent] == [1, 5, 6]
        assert [len(output.outputs[0].token_ids) for output in fast.reader.sent] == [1] * 12
        for reader in (slow.reader, fast.reader):
            assert reader.token_ids == ids
            assert reader.text == smollm2.decode(ids)
            positions = [p for output in reader.sent for p in output.outputs[0].logprobs or []]
            assert [next(iter(p)) for p in positions] == ids
            assert [next(iter(p.values())).logprob for p in positions] == [-float(place) for place in range(12)]
            assert [output.finished for output in reader.sent] == [False] * (len(reader.sent) - 1) + [True]

    run(scenario())


def test_a_frontend_that_is_behind_merges_steps(smollm2: Tokenizer) -> None:
    """While the last flush is to be paid back, steps pile up and go out as one message; in order, none is lost."""

    async def scenario() -> None:
        processor, outbox = OutputProcessor(), Outbox()
        calls = [Call(request_id, processor, outbox, smollm2, Reader()) for request_id in (1, 2, 3)]
        await asyncio.sleep(0)
        processor.process_outputs(step(0, {1: 504, 2: 504, 3: 504}))
        outbox.flush()
        outbox._not_before = asyncio.get_running_loop().time() + 0.05
        for place in range(1, 5):
            processor.process_outputs(step(place, {1: 500 + place, 2: 504, 3: 504}, is_last=place == 4))
            outbox.flush()
            await asyncio.sleep(0)
        assert [len(call.reader.sent) for call in calls] == [1, 1, 1]
        await asyncio.wait_for(asyncio.gather(*(call.task for call in calls)), 5)
        assert [len(call.reader.sent) for call in calls] == [2, 2, 2]
        assert calls[0].reader.token_ids == [504, 501, 502, 503, 504]

    run(scenario())


def test_a_failed_write_ends_its_own_call(smollm2: Tokenizer) -> None:
    """Its error comes out of run; the others go on."""

    async def scenario() -> None:
        processor, outbox = OutputProcessor(), Outbox()
        broken, sound = (Call(i, processor, outbox, smollm2, Reader()) for i in (1, 2))
        broken.reader.error = ValueError("the reader is gone")
        await asyncio.sleep(0)
        for place in range(3):
            processor.process_outputs(step(place, {1: 504, 2: 504}, is_last=place == 2))
            outbox._not_before = 0.0
            outbox.flush()
        with pytest.raises(ValueError, match="gone"):
            await broken.task
        await asyncio.wait_for(sound.task, 5)
        assert (len(broken.reader.sent), len(sound.reader.sent)) == (1, 3)

    run(scenario())


def test_an_error_comes_after_the_write_that_is_under_way(smollm2: Tokenizer) -> None:
    async def scenario() -> None:
        processor, outbox = OutputProcessor(), Outbox()
        call = Call(1, processor, outbox, smollm2, Reader(is_slow=True))
        await asyncio.sleep(0)
        processor.process_outputs(step(0, {1: 504}))
        outbox.flush()
        call.parent.fail(InternalError("lost"))
        await asyncio.sleep(0.01)
        assert not call.task.done()
        call.reader.gate.release()
        with pytest.raises(InternalError, match="lost"):
            await asyncio.wait_for(call.task, 5)
        assert len(call.reader.sent) == 1

    run(scenario())


def test_a_cancelled_call_lets_go_of_its_write(smollm2: Tokenizer) -> None:
    """And what comes for it later is sent to nobody."""

    async def scenario() -> None:
        processor, outbox = OutputProcessor(), Outbox()
        call = Call(1, processor, outbox, smollm2, Reader(is_slow=True))
        await asyncio.sleep(0)
        processor.process_outputs(step(0, {1: 504}))
        outbox.flush()
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        processor.process_outputs(step(1, {1: 504}))
        outbox.flush()
        await asyncio.sleep(0.01)
        assert call.task.cancelled()
        assert len(call.reader.sent) == 1

    run(scenario())
