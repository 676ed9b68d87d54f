"""One frontend over several cores: who gets what, deaths, late comers, other models, aborts, drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import grpc
import numpy as np
import pytest
from frontend_support import (
    GrpcCore,
    collect,
    eventually,
    generate_request,
    ids_of,
    run,
    status_of,
)
from many_cores import Many, expected, many, prompt, slow, start_core

import frontend_svc.core_pool as core_pool
from core_svc.config import EngineConfig
from frontend_svc.server import SERVICE_NAME, FrontendServer
from frontend_svc.service import TextService
from pagewire.engine import AbortOutcome, AbortReason
from pagewire.errors import ResourceExhaustedError, UnavailableError
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import frontend_pb2_grpc, types_pb2

Files = Mapping[str, bytes]


def test_requests_spread_and_output_is_the_same_everywhere(smollm2_files: Files) -> None:
    """Short prompts go where there is least to do; n completions stay together; output does not tell where.

    Case: production-stack#957
    """

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow(), slow()) as f:
            request = generate_request("Hi", n=3, temperature=1.0, max_tokens=20)
            async with f.held():
                calls = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(12)]
                await eventually(lambda: sum(f.num_requests.values()) == 12)
                assert set(f.num_requests.values()) == {4}
            results = await asyncio.gather(*calls)
            assert len({tuple(tuple(ids_of(messages, index)) for index in range(3)) for messages in results}) == 1
            greedy = generate_request("Hi", temperature=0, max_tokens=20)
            async with f.held():
                calls = [asyncio.ensure_future(collect(f.stub.Generate(greedy))) for _ in range(6)]
                await eventually(lambda: sum(f.num_requests.values()) == 6)
            assert len({tuple(ids_of(messages)) for messages in await asyncio.gather(*calls)}) == 1
            await f.is_idle()
            for core in f.cores.values():
                assert core.engine.stats().num_finished == 14
                assert core.executor.violations == []

    run(scenario())


def test_equal_prompts_meet_until_the_load_forbids_it(smollm2_files: Files) -> None:
    """A prefix has one core, whose cache then has it; a crowd with one prefix takes the others too.

    Case: production-stack#957
    """

    async def scenario() -> None:
        async with many(smollm2_files, slow(0.002), slow(0.002)) as f:
            for start in range(4):
                for _ in range(3):
                    await collect(f.stub.Generate(generate_request(token_ids=prompt(100 * start), max_tokens=2)))
            hits = sum(core.engine.stats().prefix_cache_hits for core in f.cores.values())
            assert hits == 4 * 2 * 48, "three full blocks of four are found again: the last token is always computed"
            request = generate_request(token_ids=prompt(7), max_tokens=5)
            async with f.held():
                crowd = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(30)]
                await eventually(lambda: sum(f.num_requests.values()) == 30)
                low, high = sorted(f.num_requests.values())
                assert 12 <= low < high <= low + 5
            await asyncio.gather(*crowd)
            await f.is_idle()

    run(scenario())


def test_load_of_other_frontends_counts(smollm2_files: Files) -> None:
    """A core tells what it has of others about once a second, and gets less for it."""

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow()) as f, other_frontend(f) as other:
            busy = next(iter(f.cores))
            other.keep(busy)
            await other.connected(1)
            theirs = [other.stub.Generate(generate_request(max_tokens=3000)) for _ in range(8)]
            readers = [asyncio.ensure_future(collect(call)) for call in theirs]
            load = {session.name: session for session in f.service.cores.sessions}
            await eventually(lambda: load[busy].load == 8)
            async with f.held():
                mine = [asyncio.ensure_future(collect(f.stub.Generate(generate_request()))) for _ in range(6)]
                await eventually(lambda: sum(f.num_requests.values()) == 6)
                assert f.num_requests[busy] == 0
            for call in theirs:
                call.cancel()
            await asyncio.gather(*mine)
            await asyncio.gather(*readers, return_exceptions=True)
            await f.is_idle()

    run(scenario())


@contextlib.asynccontextmanager
async def other_frontend(f: Many) -> AsyncIterator[Many]:
    service = TextService()
    server = FrontendServer(service, GrpcServer([SERVICE_NAME]))
    port = await server.start()
    async with secure_or_insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Many(frontend_pb2_grpc.FrontendServiceStub(channel), service, server, f.cores, [])
    await server.stop(0)


def test_death_of_one_core_under_load(smollm2_files: Files) -> None:
    """Its requests end with UNAVAILABLE and why, the others' go on; new ones are served at once; it may come back.

    Case: vllm#39863
    """

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow()) as f:
            request = generate_request(max_tokens=150)
            calls = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(10)]
            await eventually(lambda: set(f.num_requests.values()) == {5})
            dead, alive = f.cores
            await eventually(lambda: f.cores[dead].engine.stats().num_running == 5)
            await f.cores[dead].stop()
            await f.connected(1)
            late = await collect(f.stub.Generate(generate_request(max_tokens=5)))
            assert len(ids_of(late)) == 5
            results = await asyncio.gather(*calls, return_exceptions=True)
            errors = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
            assert len(errors) == 5
            for error in errors:
                found = from_rpc_error(error)
                assert isinstance(found, UnavailableError) and found.reason == "CORE_LOST"
            assert all(len(ids_of(r)) == 150 for r in results if isinstance(r, list))
            assert f.ready == [True, True, True], "one core is enough"
            back = GrpcCore(smollm2_files, slow())
            await back.start(int(dead.rpartition(":")[2]))
            f.cores[dead] = back
            await f.connected(2)
            assert f.num_requests == {dead: 0, alive: 0}
            await f.is_idle()

    run(scenario())


def test_a_core_that_refuses_is_passed_over(smollm2_files: Files) -> None:
    """A core that drains refuses an Add: the request goes to another one and its caller notices nothing."""

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow()) as f:
            draining, other = f.cores
            running = asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=150, request_id="r"))))
            await eventually(lambda: sum(f.num_requests.values()) == 1)
            if not f.num_requests[draining]:
                draining, other = other, draining
            f.cores[draining].servicer.unavailable = "the core is shutting down"
            for i in range(12):
                assert len(ids_of(await collect(f.stub.Generate(generate_request(f"Number {i}", max_tokens=3))))) == 3
            f.cores[other].servicer.unavailable = "the core is shutting down"
            error = await status_of(f.stub.Generate(generate_request()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in str(error.details())
            assert len(ids_of(await running)) == 150
            await f.is_idle()

    run(scenario())


def test_a_core_that_dies_while_it_is_asked(smollm2_files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Add that ends with the core's loss goes to another core, once, with nothing said twice."""

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow()) as f:
            ids = prompt(5)
            first = f.service.cores.choose(f.service.cores.inputs, key_of(ids), 1)
            lost = asyncio.Event()

            async def add(requests: object) -> None:
                lost.set()
                await f.of(first.name).stop()
                raise UnavailableError("the connection broke", reason="CORE_LOST")

            monkeypatch.setattr(first.client, "add", add)
            messages = await collect(f.stub.Generate(generate_request(token_ids=ids, max_tokens=9)))
            assert lost.is_set()
            assert ids_of(messages) == expected(f.of(first.name), ids, 9)
            await f.connected(1)
            await f.is_idle()

    run(scenario())


def key_of(ids: types_pb2.TokenIds) -> bytes:
    from frontend_svc.balance import prefix_key

    return prefix_key(np.asarray(ids.ids, np.int32))


def test_cores_come_and_go(smollm2_files: Files) -> None:
    """One that joins later is used; one that is left out finishes what it has and is let go."""

    async def scenario() -> None:
        async with many(smollm2_files, slow()) as f:
            (first,) = f.cores
            address, f.cores["joined"] = await start_core(smollm2_files, slow(max_model_len=2048))
            f.keep(first, address)
            await f.connected(2)
            assert f.service.served_model().info.max_model_len == 2048
            async with f.held():
                request = generate_request(max_tokens=30)
                calls = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(6)]
                await eventually(lambda: f.num_requests == {first: 3, address: 3})
                f.keep(address)
                request = generate_request(max_tokens=5)
                more = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(3)]
                await eventually(lambda: f.num_requests.get(address) == 6)
            for messages in await asyncio.gather(*calls, *more):
                assert len(ids_of(messages)) in (30, 5)
            await f.connected(1)
            assert list(f.num_requests) == [address]
            f.keep(address, first)
            await f.connected(2)
            await f.is_idle()

    run(scenario())


def test_a_core_of_another_model_is_not_used(
    smollm2_files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it serves the same one, or no core of the first model is left."""
    monkeypatch.setattr(core_pool, "OTHER_MODEL_RETRY_S", 0.1)

    async def scenario() -> None:
        async with many(smollm2_files, slow()) as f:
            (first,) = f.cores
            other, f.cores["other"] = await start_core(smollm2_files, slow(), weights_id="others", model="other")
            f.keep(first, other)
            await eventually(lambda: "is not used" in caplog.text)
            assert "weights_id is 'others'" in caplog.text and other in caplog.text
            for i in range(4):
                await collect(f.stub.Generate(generate_request(f"Number {i}")))
            assert f.cores["other"].engine.num_steps == 0
            await f.cores[first].stop()
            await eventually(lambda: list(f.num_requests) == [other], 30)
            assert f.service.served_model().info.model == "other"
            await collect(f.stub.Generate(generate_request()))
            back = GrpcCore(smollm2_files, slow())
            f.cores[first] = back
            caplog.clear()
            await back.start(int(first.rpartition(":")[2]))
            await eventually(lambda: f"core {first} is not used" in caplog.text, 30)

    run(scenario())


def test_ids_are_unique_over_all_cores_and_aborts_find_theirs(smollm2_files: Files) -> None:
    """Case: smg#1351"""

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow()) as f:
            names = [f"r{i}" for i in range(6)]
            calls = [
                asyncio.ensure_future(collect(f.stub.Generate(generate_request(max_tokens=3000, request_id=name))))
                for name in names
            ]
            await eventually(lambda: set(f.num_requests.values()) == {3})
            twice = await status_of(f.stub.Generate(generate_request(request_id="r3")))
            assert twice.code() is grpc.StatusCode.ALREADY_EXISTS
            response = await f.stub.Abort(pb.AbortRequest(request_ids=[*names, "nobody"]))
            outcomes = [AbortOutcome(result.outcome) for result in response.results]
            assert outcomes == [AbortOutcome.ABORTED] * 6 + [AbortOutcome.NOT_FOUND]
            for messages in await asyncio.gather(*calls):
                assert messages[-1].outputs[0].finish_reason == types_pb2.FINISH_REASON_ABORT
            await f.is_idle()
            for core in f.cores.values():
                await eventually(lambda core=core: core.engine.stats().num_aborted == 3)  # type: ignore[misc]
            for session in f.service.cores.sessions:
                assert session.outputs.num_aborts == {AbortReason.ABORT_CALL: 3}

    run(scenario())


def test_full_cores_refuse_and_room_anywhere_is_used(smollm2_files: Files) -> None:
    """Case: TGI#439"""

    async def scenario() -> None:
        small = slow(config=EngineConfig(max_num_requests=2))
        async with many(smollm2_files, small, small) as f:
            ids = prompt(3)
            async with f.held():
                request = generate_request(token_ids=ids)
                calls = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(4)]
                await eventually(lambda: set(f.num_requests.values()) == {2})
                error = from_rpc_error(await status_of(f.stub.Generate(request)))
                assert isinstance(error, ResourceExhaustedError) and error.retry_after_s
            await asyncio.gather(*calls)
            await f.is_idle()

    run(scenario())


def test_drain_waits_for_all_cores(smollm2_files: Files) -> None:
    """Case: llm-d-router#1885"""

    async def scenario() -> None:
        async with many(smollm2_files, slow(), slow()) as f:
            async with f.held():
                request = generate_request(max_tokens=60)
                calls = [asyncio.ensure_future(collect(f.stub.Generate(request))) for _ in range(4)]
                await eventually(lambda: set(f.num_requests.values()) == {2})
                stopping = asyncio.ensure_future(f.server.stop(20))
            assert all(len(ids_of(messages)) == 60 for messages in await asyncio.gather(*calls))
            await asyncio.wait_for(stopping, 5)

    run(scenario())
