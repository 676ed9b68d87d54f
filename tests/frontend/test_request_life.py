"""How requests end before their time: cancelled, aborted, late, failed, refused; and that nothing of them stays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
import pytest
from frontend_support import (
    CoreOptions,
    collect,
    eventually,
    expected_text,
    frontend,
    generate_request,
    ids_of,
    run,
    status_of,
    text_of,
)
from grpc_status import rpc_status

from core_svc.config import EngineConfig
from core_svc.fake_executor import FakeOptions
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import AbortReason
from pagewire.errors import ResourceExhaustedError, UnavailableError
from pagewire.runtime.status import from_rpc_error
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import types_pb2

Files = Mapping[str, bytes]
ABORTED = types_pb2.ABORT_OUTCOME_ABORTED
NOT_FOUND = types_pb2.ABORT_OUTCOME_NOT_FOUND
ALREADY_FINISHED = types_pb2.ABORT_OUTCOME_ALREADY_FINISHED


def slow(latency_s: float = 0.01, **more: object) -> CoreOptions:
    return CoreOptions(options=FakeOptions(latency_s=latency_s), **more)  # type: ignore[arg-type]


def test_an_abort_does_not_wait_for_the_answer_to_another(
    smollm2_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reason is a call of its own, and a core answers after its step; in turn they would take many steps."""

    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            session, sent = f.service.session, asyncio.Event()
            seen: list[AbortReason] = []

            async def abort(request_ids: list[int], reason: AbortReason) -> list[object]:
                seen.append(reason)
                await sent.wait()
                return []

            monkeypatch.setattr(session.client, "abort", abort)
            session.send({AbortReason.CLIENT: [1], AbortReason.STOP_STRING: [2], AbortReason.DEADLINE: [3]})
            await eventually(lambda: len(seen) == 3)
            sent.set()

    run(scenario())


@pytest.mark.parametrize("output_kind", [types_pb2.OUTPUT_KIND_DELTA, types_pb2.OUTPUT_KIND_FINAL_ONLY])
def test_cancelled_call_frees_the_core(
    kind: str, output_kind: types_pb2.OutputKind.ValueType, smollm2_files: Files
) -> None:
    """A client that goes away ends its request within two steps, also where it waits for the end only.

    Case: vllm#54947
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow(0.05)) as f:
            call = f.stub.Generate(generate_request(max_tokens=2000, output_kind=output_kind))
            reader = asyncio.ensure_future(collect(call))
            await eventually(lambda: f.engine.num_steps > 2)
            call.cancel()
            await eventually(lambda: f.service.session.outputs.num_aborts.get(AbortReason.CLIENT) == 1)
            step = f.engine.num_steps
            await f.is_idle()
            assert f.engine.num_steps <= step + 2
            assert f.engine.stats().num_aborted == 1
            await asyncio.gather(reader, return_exceptions=True)

    run(scenario())


def test_broken_connection_frees_the_core(kind: str, smollm2_files: Files) -> None:
    """The same where the whole connection goes.

    Case: vllm#54947
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            reader = asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=2000, n=3))))
            await eventually(lambda: f.engine.stats().num_running == 3)
            await f.channel.close()
            await f.is_idle()
            await asyncio.gather(reader, return_exceptions=True)

    run(scenario())


def test_cancelled_while_waiting_in_the_queue(kind: str, smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow(config=EngineConfig(max_num_seqs=1))) as f:
            running = f.stub.Generate(generate_request(max_tokens=2000))
            first = asyncio.ensure_future(collect(running))
            await eventually(lambda: f.engine.stats().num_running == 1)
            waiting = f.stub.Generate(generate_request(max_tokens=2000))
            second = asyncio.ensure_future(collect(waiting))
            await eventually(lambda: f.engine.stats().num_waiting == 1)
            waiting.cancel()
            await eventually(lambda: f.engine.stats().num_waiting == 0)
            running.cancel()
            await f.is_idle()
            await asyncio.gather(first, second, return_exceptions=True)

    run(scenario())


def test_abort_ends_the_stream_with_usage(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """The waiter wakes, gets what there is and what it cost; a second abort finds nothing to do.

    Case: smg#1351
    Case: dynamo#12292
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            reader = asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=2000, request_id="a"))))
            await eventually(lambda: f.engine.num_steps > 5)
            response = await f.stub.Abort(pb.AbortRequest(request_ids=["a", "b"]))
            assert [(r.request_id, r.outcome) for r in response.results] == [("a", ABORTED), ("b", NOT_FOUND)]
            messages = await asyncio.wait_for(reader, 5)
            last = messages[-1]
            assert last.is_finished
            assert last.outputs[0].finish_reason == types_pb2.FINISH_REASON_ABORT
            shown = ids_of(messages)
            assert last.usage.completion_tokens == len(shown) > 0
            assert last.usage.prompt_tokens == 2
            assert text_of(messages) == expected_text(smollm2, shown)
            again = await f.stub.Abort(pb.AbortRequest(request_ids=["a"]))
            assert again.results[0].outcome == ALREADY_FINISHED
            await f.is_idle()

    run(scenario())


def test_abort_matches_ids_exactly(kind: str, smollm2_files: Files) -> None:
    """An id that begins another one does not end it.

    Case: sglang#30912
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            reader = asyncio.ensure_future(
                collect(f.stub.Generate(generate_request(max_tokens=20, request_id="request-1")))
            )
            await eventually(lambda: f.engine.num_steps > 2)
            response = await f.stub.Abort(pb.AbortRequest(request_ids=["request", "request-", "request-11", ""]))
            assert [r.outcome for r in response.results] == [NOT_FOUND] * 4
            assert len(ids_of(await reader)) == 20

    run(scenario())


def test_abort_of_parallel_completions(kind: str, smollm2_files: Files) -> None:
    """All children end, and both sides are empty.

    Case: vllm#51629
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            reader = asyncio.ensure_future(
                collect(f.stub.Generate(generate_request(max_tokens=2000, n=5, request_id="p")))
            )
            await eventually(lambda: f.engine.stats().num_running == 5)
            await f.stub.Abort(pb.AbortRequest(request_ids=["p"]))
            messages = await reader
            ended = {o.index for m in messages for o in m.outputs if o.finish_reason == types_pb2.FINISH_REASON_ABORT}
            assert ended == {0, 1, 2, 3, 4}
            await f.is_idle()
            assert f.engine.stats().num_aborted == 5

    run(scenario())


def test_abort_before_the_request_is_registered(kind: str, smollm2_files: Files) -> None:
    """An abort that comes while the prompt is tokenized is not lost: the request never runs.

    Case: smg#1351
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            session = f.service.session
            process, may_go_on = session.inputs.process, asyncio.Event()
            loop = asyncio.get_running_loop()

            def held(request: object) -> object:
                asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(10)
                return process(request)  # type: ignore[arg-type]

            session.inputs.process = held  # type: ignore[assignment,method-assign]
            reader = asyncio.ensure_future(collect(f.stub.Generate(generate_request(request_id="early"))))
            await eventually(lambda: f.service.num_requests == 1)
            response = await f.stub.Abort(pb.AbortRequest(request_ids=["early"]))
            assert response.results[0].outcome == ABORTED
            may_go_on.set()
            messages = await reader
            assert messages[-1].outputs[0].finish_reason == types_pb2.FINISH_REASON_ABORT
            assert messages[-1].usage.completion_tokens == 0
            await f.is_idle()
            assert f.engine.num_steps == 0

    run(scenario())


def test_external_ids(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """A living id is refused, in the streams nothing mixes, and an id may come again once its request has ended.

    Case: vllm#10583
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            prompt = smollm2.encode("Hello there")
            reader = asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=40, request_id="x"))))
            await eventually(lambda: f.engine.num_steps > 2)
            error = await status_of(f.stub.Generate(generate_request("Another", request_id="x")))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert "x" in error.details()
            assert ids_of(await reader) == f.expected_ids(prompt, 40)
            for seed in range(20):
                # At once after the last message: the id is free by then.
                messages = await collect(f.stub.Generate(generate_request(seed=seed, max_tokens=2, request_id="x")))
                assert ids_of(messages) == f.expected_ids(prompt, 2, seed=seed)
            aborted = f.stub.Generate(generate_request(max_tokens=2000, request_id="x"))
            reader = asyncio.ensure_future(collect(aborted))
            await eventually(lambda: f.engine.stats().num_running == 1)
            await f.stub.Abort(pb.AbortRequest(request_ids=["x"]))
            await reader
            messages = await collect(f.stub.Generate(generate_request(max_tokens=3, request_id="x")))
            assert ids_of(messages) == f.expected_ids(prompt, 3)
            await f.is_idle()

    run(scenario())


def test_deadline(kind: str, smollm2_files: Files) -> None:
    """The caller's deadline travels to the core and ends the request there too."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            error = await status_of(f.stub.Generate(generate_request(max_tokens=2000), timeout=0.3))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await f.is_idle()

    run(scenario())


def test_one_failed_row_harms_nobody_else(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """A row that fails in the worker ends its own request with a status, and its siblings with it."""

    async def scenario() -> None:
        options = FakeOptions(latency_s=0.005, failing_request_ids={2})
        async with frontend(kind, smollm2_files, CoreOptions(options=options)) as f:
            good = asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=30))))
            await eventually(lambda: f.engine.num_steps > 0)
            error = await status_of(f.stub.Generate(generate_request(n=3, max_tokens=2000)))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "logits" in error.details()
            assert ids_of(await good) == f.expected_ids(smollm2.encode("Hello there"), 30)
            await f.is_idle()

    run(scenario())


def test_lost_worker_ends_everything(kind: str, smollm2_files: Files) -> None:
    """All streams end with UNAVAILABLE, and new calls get it at once."""

    async def scenario() -> None:
        options = FakeOptions(latency_s=0.005, failures={20: UnavailableError("the worker died")})
        async with frontend(kind, smollm2_files, CoreOptions(options=options)) as f:
            calls = [f.stub.Generate(generate_request(max_tokens=2000)) for _ in range(5)]
            errors = await asyncio.wait_for(asyncio.gather(*map(status_of, calls)), 5)
            assert {e.code() for e in errors} == {grpc.StatusCode.UNAVAILABLE}
            error = await status_of(f.stub.Generate(generate_request()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert len(f.service.session.outputs) == 0

    run(scenario())


def test_overload_is_refused_with_a_hint(kind: str, smollm2_files: Files) -> None:
    """Above the core's number of requests: RESOURCE_EXHAUSTED with RetryInfo, and no harm to those inside.

    Case: TGI#439
    """

    async def scenario() -> None:
        options = slow(config=EngineConfig(max_num_requests=4, max_num_seqs=2))
        async with frontend(kind, smollm2_files, options) as f:
            inside = [asyncio.ensure_future(collect(f.stub.Generate(generate_request(n=2)))) for _ in range(2)]
            await eventually(lambda: f.service.session.num_requests == 2)
            error = await status_of(f.stub.Generate(generate_request()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            found = from_rpc_error(error)
            assert isinstance(found, ResourceExhaustedError)
            assert found.retry_after_s is not None
            assert found.retry_after_s > 0
            assert rpc_status.from_call(error) is not None
            for messages in await asyncio.gather(*inside):
                assert messages[-1].usage.completion_tokens == 16
            await f.is_idle()

    run(scenario())


def test_a_client_that_does_not_read_is_cut_off(kind: str, smollm2_files: Files) -> None:
    """gRPC holds megabytes for a slow reader; past that and our own limit it gets RESOURCE_EXHAUSTED."""

    async def scenario() -> None:
        options = CoreOptions(max_model_len=16384, num_blocks=2000)
        async with frontend(kind, smollm2_files, options, max_tokens_behind=200) as f:
            request = generate_request(max_tokens=16000, output_kind=types_pb2.OUTPUT_KIND_CUMULATIVE, detokenize=False)
            call = f.stub.Generate(request)
            messages = aiter(call)
            await anext(messages)
            counts = f.service.session.outputs.num_aborts
            await eventually(lambda: counts.get(AbortReason.SLOW_CONSUMER) == 1, 40)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    await anext(messages)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await f.is_idle()

    run(scenario(), 90)


def test_drain_lets_streams_end(kind: str, smollm2_files: Files) -> None:
    """A stop refuses new calls and lets running ones finish.

    Case: llm-d-router#1885
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            reader = asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=30))))
            await eventually(lambda: f.engine.num_steps > 2)
            stopping = asyncio.ensure_future(f.server.stop(10))
            await asyncio.sleep(0.05)
            error = await status_of(f.stub.Generate(generate_request(), timeout=5))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert len(ids_of(await reader)) == 30
            await asyncio.wait_for(stopping, 5)

    run(scenario())


def test_drain_ends_what_does_not(kind: str, smollm2_files: Files) -> None:
    """Streams that are not done in time end with UNAVAILABLE."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, slow()) as f:
            failing = asyncio.ensure_future(status_of(f.stub.Generate(generate_request(max_tokens=3000))))
            await eventually(lambda: f.engine.num_steps > 2)
            await asyncio.wait_for(f.server.stop(0.2), 8)
            error = await failing
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in error.details()
            await eventually(lambda: not f.engine.scheduler.requests)

    run(scenario())
