"""Who watches a frontend is told of every request once, when it comes and when it ends, whatever its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
import pytest
from frontend_support import CoreOptions, collect, eventually, frontend, generate_request, run, status_of

from core_svc.fake_executor import FakeOptions
from frontend_svc.observer import Observers, RequestTimeline
from pagewire.engine import AbortReason, FinishReason, TraceContext
from pagewire.errors import InvalidArgumentError
from pagewire.v1 import frontend_pb2 as pb

Files = Mapping[str, bytes]


class Watcher:
    def __init__(self) -> None:
        self.begun: list[RequestTimeline] = []
        self.done: list[RequestTimeline] = []

    def began(self, timeline: RequestTimeline) -> None:
        self.begun.append(timeline)
        timeline.request.trace_context = TraceContext("of " + timeline.request.request_id)

    def ended(self, timeline: RequestTimeline) -> None:
        self.done.append(timeline)


@pytest.mark.parametrize("kind", ["inprocess", "grpc"])
def test_every_end_is_told_once_with_its_times(kind: str, smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend(kind, smollm2_files, CoreOptions(options=FakeOptions(latency_s=0.02))) as f:
            watcher = Watcher()
            f.service._observers = Observers([watcher])
            await collect(f.stub.Generate(generate_request(request_id="whole", n=2, max_tokens=4)))
            refused = await status_of(f.stub.Generate(generate_request(request_id="refused", temperature=-1)))
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            late = await status_of(f.stub.Generate(generate_request(request_id="late", max_tokens=900), timeout=0.3))
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            call = f.stub.Generate(generate_request(request_id="gone", max_tokens=900))
            await call.read()
            call.cancel()
            called_off = f.stub.Generate(generate_request(request_id="called off", max_tokens=900))
            await called_off.read()
            contexts = {r.trace_context.traceparent for r in list(f.engine.scheduler.requests.values())}
            assert "of called off" in contexts
            await f.stub.Abort(pb.AbortRequest(request_ids=["called off"]))
            while await called_off.read() is not grpc.aio.EOF:
                pass
            await eventually(lambda: len(watcher.done) == 5)
            await f.is_idle()
            assert [t.request.request_id for t in watcher.begun] == ["whole", "refused", "late", "gone", "called off"]
            by_id = {t.request.request_id: t for t in watcher.done}
            assert len(by_id) == 5
            whole = by_id["whole"]
            assert whole.parent is not None and whole.error is None and whole.abort_reason is None
            times = (whole.received_ns, whole.tokenize_ns, whole.tokenized_ns, whole.added_ns)
            assert [*times, whole.parent.first_token_ns, whole.ended_ns] == sorted(
                [*times, whole.parent.first_token_ns, whole.ended_ns]
            )
            assert [c.finish_reason for c in whole.parent.children] == [FinishReason.LENGTH] * 2
            assert (whole.parent.usage.num_completion_tokens, whole.model) == (
                8,
                f.service.session.inputs.info.model.model,
            )
            assert isinstance(by_id["refused"].error, InvalidArgumentError) and by_id["refused"].parent is None
            assert by_id["late"].abort_reason is AbortReason.DEADLINE or by_id["late"].error is not None
            assert by_id["gone"].abort_reason is AbortReason.CLIENT
            assert isinstance(by_id["gone"].error, asyncio.CancelledError)
            assert by_id["called off"].abort_reason is AbortReason.ABORT_CALL and by_id["called off"].error is None

    run(scenario())
