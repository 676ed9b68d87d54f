"""Handshake, Add and Abort over real gRPC: all or none, idempotent, bounded, and refused with a reason."""

from __future__ import annotations

import grpc
import grpc.aio
import numpy as np
import pytest

from pagewire.runtime.status import from_rpc_error
from pagewire.v1 import core_pb2, core_pb2_grpc, types_pb2
from tests.core_edge.harness import (
    TIMEOUT_S,
    Core,
    Frontend,
    engine_request,
    eventually,
    refused,
    with_core,
)
from tests.core_edge.worker_server import Script, expected_tokens


def handshake(incarnation: str = "f", low: int = 1, high: int = 1) -> core_pb2.HandshakeRequest:
    return core_pb2.HandshakeRequest(
        frontend_incarnation=incarnation, protocol_versions=types_pb2.ProtocolVersions(min=low, max=high)
    )


def test_handshake_tells_what_the_core_serves() -> None:
    async def body(core: Core) -> None:
        response = await core.stub.Handshake(handshake())
        assert response.core_incarnation == core.process.incarnation
        assert response.model.fingerprint.model == "scripted"
        assert (response.block_size, response.num_kv_blocks, response.max_num_seqs) == (16, 4095, 7)
        assert (response.lease_ms, response.heartbeat_interval_ms) == (2000, 50)
        assert list(response.features) == ["prefix_caching"]
        assert response.protocol_versions.min <= 1 <= response.protocol_versions.max
        message = await refused(core.stub.Handshake(handshake(low=2, high=9)), grpc.StatusCode.FAILED_PRECONDITION)
        assert "[2, 9]" in message
        await refused(core.stub.Handshake(handshake("")), grpc.StatusCode.INVALID_ARGUMENT)

    with_core(body, max_num_seqs=7)


def test_add_stream_finish() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        requests = [engine_request(1, range(1, 40), 9), engine_request(2, [5], 3)]
        response = await frontend.add(*requests)
        assert response.core_incarnation == core.process.incarnation
        await frontend.ended(1, 2)
        assert frontend.tokens == {r.request_id: expected_tokens(r) for r in requests}
        assert frontend.finished[1].reason == types_pb2.FINISH_REASON_LENGTH
        await core.assert_empty()

    with_core(body)


def test_add_needs_an_open_stream() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        message = await refused(frontend.add(engine_request(1)), grpc.StatusCode.FAILED_PRECONDITION)
        assert "StreamOutputs" in message
        await frontend.open()
        await frontend.add(engine_request(1))
        await frontend.ended(1)
        await frontend.break_stream()
        await eventually(lambda: core.process._hub.num_open == 0)
        await refused(frontend.add(engine_request(2)), grpc.StatusCode.FAILED_PRECONDITION)

    with_core(body)


def test_a_repeated_add_changes_nothing() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        for _ in range(3):
            await frontend.add(engine_request(1, max_tokens=20))
        await frontend.ended(1)
        await frontend.add(engine_request(1, max_tokens=20))
        await frontend.add(engine_request(2))
        await frontend.ended(2)
        assert frontend.tokens[1] == expected_tokens(engine_request(1, max_tokens=20))
        assert (await core.stats()).num_finished == 2
        await core.assert_empty()

    with_core(body)


def test_children_are_added_all_or_none() -> None:
    """Case: vllm#51629"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        bad = engine_request(12, [49_999, 50_000])
        message = await refused(
            frontend.add(engine_request(10), engine_request(11), bad), grpc.StatusCode.INVALID_ARGUMENT
        )
        assert "requests[2].prompt_token_ids[1]" in message and "50000" in message
        assert (await core.stats()).num_running == 0
        await frontend.add(*(engine_request(i, max_tokens=60_000) for i in (20, 21, 22)))
        await eventually(lambda: all(len(frontend.tokens[i]) > 2 for i in (20, 21, 22)))
        assert await frontend.abort(20, 21, 22) == [types_pb2.ABORT_OUTCOME_ABORTED] * 3
        await frontend.ended(20, 21, 22)
        await core.assert_empty()
        assert not {10, 11, 12} & frontend.finished.keys()

    with_core(body)


def test_abort_outcomes_and_tombstone() -> None:
    """An abort that overtakes its Add, an unknown id, a second abort.

    Case: smg#1351
    Case: vllm#43226
    """

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await frontend.add(engine_request(1), engine_request(2, max_tokens=60_000))
        await frontend.ended(1)
        outcomes = await frontend.abort(1, 2, 3, reason=types_pb2.ABORT_REASON_STOP_STRING)
        assert outcomes == [
            types_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
            types_pb2.ABORT_OUTCOME_ABORTED,
            types_pb2.ABORT_OUTCOME_NOT_FOUND,
        ]
        await frontend.ended(2)
        assert frontend.finished[2].reason == types_pb2.FINISH_REASON_ABORT
        assert frontend.finished[2].abort_reason == types_pb2.ABORT_REASON_STOP_STRING
        # The abort of 3 overtook its Add, which must not run.
        await frontend.add(engine_request(3, max_tokens=60_000), engine_request(4))
        await frontend.ended(3, 4)
        assert frontend.tokens[3] == []
        assert frontend.finished[3].reason == types_pb2.FINISH_REASON_ABORT
        assert await frontend.abort(2) == [types_pb2.ABORT_OUTCOME_ALREADY_FINISHED]
        await core.assert_empty()

    with_core(body)


def test_large_messages() -> None:
    """Case: triton#1776"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        prompt = np.ones(5 * 2**20 // 4 + 1, np.int32)
        # The message passes; that the pool is too small for it is another matter, and is said.
        message = await refused(frontend.add(engine_request(1, prompt)), grpc.StatusCode.INVALID_ARGUMENT)
        assert "prompt_token_ids" in message and str(len(prompt)) in message
        huge = np.ones(65 * 2**20 // 4, np.int32)
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(core.address, options=options) as channel:
            stub = core_pb2_grpc.EngineCoreServiceStub(channel)
            request = core_pb2.AddRequest(frontend_incarnation=frontend.incarnation, requests=[engine_request(2, huge)])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Add(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-message-bytes" in from_rpc_error(caught.value).message
        await frontend.add(engine_request(3))
        await frontend.ended(3)

    with_core(body)


def test_a_prompt_message_of_five_mebibytes_runs() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        request = engine_request(1, np.ones(5 * 2**20 // 4 + 1, np.int32), 2)
        await frontend.add(request)
        await eventually(lambda: 1 in frontend.finished, 60)
        assert frontend.tokens[1] == expected_tokens(request)
        await core.assert_empty()

    with_core(body, Script(num_kv_blocks=100_000), max_num_batched_tokens=2**18, enable_prefix_caching=False)


def test_log_probabilities_that_fit_no_message_are_refused() -> None:
    """One request must not break the stream that carries everybody's results; what fits in parts comes over steps."""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        request = engine_request(1, range(1, 1001))
        request.sampling_params.prompt_logprobs = -1
        message = await refused(frontend.add(engine_request(2), request), grpc.StatusCode.INVALID_ARGUMENT)
        assert "requests[1].sampling_params.prompt_logprobs" in message and "at most 32768 candidates" in message
        request.sampling_params.prompt_logprobs = 100
        await frontend.add(request, engine_request(3))
        await frontend.ended(1, 3)
        assert (await core.stats()).num_steps >= 4 + 5 - 1

    with_core(body, max_message_bytes=2**19)


def test_too_many_ids_in_one_message_are_refused() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        message = await refused(frontend.abort(*range(70_000)), grpc.StatusCode.INVALID_ARGUMENT)
        assert "65536" in message
        await frontend.add(engine_request(1))
        await frontend.ended(1)

    with_core(body)


def test_a_full_core_says_when_to_come_back() -> None:
    """Case: TGI#439"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        core.script.hold.clear()
        await frontend.add(*(engine_request(i) for i in range(4)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await frontend.add(engine_request(9))
        error = from_rpc_error(caught.value)
        assert error.code == "RESOURCE_EXHAUSTED" and getattr(error, "retry_after_s", None)
        # Whose answer was lost asks again: the core has these, and must not say that it has not.
        await frontend.add(*(engine_request(i) for i in range(4)))
        core.script.hold.set()
        await frontend.ended(0, 1, 2, 3)
        await frontend.acknowledge()
        await eventually(lambda: not core.process._hub.require_open(frontend.incarnation)._finished)
        await frontend.add(engine_request(2))
        assert core.process._hub.require_open(frontend.incarnation).num_live == 0

    with_core(body, max_num_requests=4, worker_silence_s=30.0)
