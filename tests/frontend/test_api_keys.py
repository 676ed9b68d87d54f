"""API keys: who is let in, who is not, what changes while a frontend runs, and whose request ids are whose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from frontend_support import CoreOptions, GrpcCore, collect, eventually, generate_request, run, status_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core_svc.fake_executor import FakeOptions
from frontend_svc.api_keys import ApiKeys, parse_keys
from frontend_svc.auth_wire import AuthInterceptor
from frontend_svc.core_client import GrpcCoreClient
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.observer import Observers, RequestTimeline
from frontend_svc.server import SERVICE_NAME, FrontendServer
from frontend_svc.service import TextService
from pagewire.client import AsyncClient
from pagewire.engine import AbortOutcome
from pagewire.errors import UnauthenticatedError
from pagewire.runtime.instruments import Instruments
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.rpc_metrics import RpcServerMetrics
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import frontend_pb2_grpc, types_pb2

Files = Mapping[str, bytes]
ALICE, BOB, NEW = "alices-key-0123456789", "bobs-key-0123456789ab", "new-key-0123456789abc"
TEXT = f"# who may call\nalice:{ALICE}\n\nbob: {BOB}\n"


@dataclass
class Guarded:
    stub: frontend_pb2_grpc.FrontendServiceStub
    channel: grpc.aio.Channel
    service: TextService
    target: str
    path: Path


@contextlib.asynccontextmanager
async def guarded(files: Files, tmp_path: Path) -> AsyncIterator[Guarded]:
    path = tmp_path / "keys"
    path.write_text(TEXT)
    keys = ApiKeys(str(path))
    core = GrpcCore(files, CoreOptions(options=FakeOptions(latency_s=0.01)))
    target = await core.start()

    async def connect() -> EngineCoreClient:
        return await GrpcCoreClient.connect(target, new_incarnation())

    service = TextService(connect)
    server = FrontendServer(
        service, GrpcServer([SERVICE_NAME], interceptors=[AuthInterceptor(SERVICE_NAME, keys)]), keys=keys
    )
    port = await server.start()
    try:
        async with secure_or_insecure_channel(f"127.0.0.1:{port}") as channel:
            await service.wait_ready()
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            yield Guarded(stub, channel, service, f"127.0.0.1:{port}", path)
    finally:
        await server.stop(0)
        await core.stop()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_every_call_needs_a_key(smollm2_files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No RPC of the service is open, health and reflection are, and no key gets into a log or a message."""
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        async with guarded(smollm2_files, tmp_path) as f:
            methods = pb.DESCRIPTOR.services_by_name["FrontendService"].methods
            assert len(methods) == 9
            for method in methods:
                make = f.channel.unary_stream if method.server_streaming else f.channel.unary_unary
                call = make(f"/{SERVICE_NAME}/{method.name}")
                for metadata, reason in (
                    ((), "API_KEY_MISSING"),
                    (bearer("wrong-key-0123456789"), "API_KEY_INVALID"),
                    (bearer(ALICE[:-1]), "API_KEY_INVALID"),
                    ((("authorization", ALICE),), "API_KEY_INVALID"),
                ):
                    error = await status_of(call(b"\xff not protobuf", metadata=metadata, timeout=10))
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
                    found = from_rpc_error(error)
                    assert isinstance(found, UnauthenticatedError) and found.reason == reason
            health = await health_pb2_grpc.HealthStub(f.channel).Check(
                health_pb2.HealthCheckRequest(service="liveness")
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(f.channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            assert len([r async for r in reflection.ServerReflectionInfo(iter([request]))]) == 1
            messages = await collect(f.stub.Generate(generate_request(), metadata=bearer(BOB)))
            assert messages[-1].is_finished
            for text in (caplog.text, *(str(e) for e in (found.message, found.metadata))):
                assert "key-0123456789" not in text

    run(scenario())


def test_names_of_methods_that_do_not_exist_are_no_labels(tmp_path: Path) -> None:
    """Anybody can call any name: a refusal must not make a time series of each."""
    (tmp_path / "keys").write_text(TEXT)
    instruments = Instruments()

    async def scenario() -> None:
        guards = [
            RpcServerMetrics(instruments, counts_messages=False),
            AuthInterceptor(SERVICE_NAME, ApiKeys(str(tmp_path / "keys"))),
        ]
        server = GrpcServer([SERVICE_NAME], interceptors=guards)
        frontend_pb2_grpc.add_FrontendServiceServicer_to_server(frontend_pb2_grpc.FrontendServiceServicer(), server.aio)
        port = await server.start()
        async with secure_or_insecure_channel(f"127.0.0.1:{port}") as channel:
            for name, expected in (
                ("Evil1", "UNIMPLEMENTED"),
                ("Evil2", "UNIMPLEMENTED"),
                ("Abort", "UNAUTHENTICATED"),
            ):
                error = await status_of(channel.unary_unary(f"/{SERVICE_NAME}/{name}")(b"", timeout=10))
                assert error.code().name == expected
        await server.drain(0)

    run(scenario())
    (calls,) = [found for found in instruments if found.name == "rpc_server_call_duration_seconds"]
    assert set(calls.read()) == {("grpc", f"{SERVICE_NAME}/Abort", "UNAUTHENTICATED")}


def test_public_client_and_key_name(smollm2_files: Files, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with guarded(smollm2_files, tmp_path) as f:
            seen: list[RequestTimeline] = []

            class Watcher:
                def began(self, timeline: RequestTimeline) -> None:
                    seen.append(timeline)

                def ended(self, timeline: RequestTimeline) -> None:
                    pass

            f.service._observers = Observers([Watcher()])
            async with AsyncClient(f.target, api_key=ALICE) as client:
                assert len((await client.complete("Hello", max_tokens=3)).outputs[0].token_ids) == 3
                assert await client.tokenize("Hello")
            assert [timeline.api_key for timeline in seen] == ["alice"]
            unread = pb.ChatRequest(messages=[pb.ChatMessage()])
            error = await status_of(f.stub.Chat(unread, metadata=bearer(BOB)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [timeline.api_key for timeline in seen] == ["alice", "bob"]
            async with AsyncClient(f.target) as client:
                with pytest.raises(UnauthenticatedError):
                    await client.tokenize("Hello")

    run(scenario())


def test_request_ids_belong_to_a_key(smollm2_files: Files, tmp_path: Path) -> None:
    """Two keys may use one id, and neither ends the other's request."""

    async def scenario() -> None:
        async with guarded(smollm2_files, tmp_path) as f:
            request = generate_request(request_id="job", max_tokens=3000)
            alice = asyncio.ensure_future(collect(f.stub.Generate(request, metadata=bearer(ALICE))))
            await eventually(lambda: f.service.num_requests == 1)
            abort = pb.AbortRequest(request_ids=["job"])
            response = await f.stub.Abort(abort, metadata=bearer(BOB))
            assert response.results[0].outcome == AbortOutcome.NOT_FOUND
            bob = asyncio.ensure_future(collect(f.stub.Generate(request, metadata=bearer(BOB))))
            await eventually(lambda: f.service.num_requests == 2)
            again = await status_of(f.stub.Generate(request, metadata=bearer(BOB)))
            assert again.code() is grpc.StatusCode.ALREADY_EXISTS
            response = await f.stub.Abort(abort, metadata=bearer(BOB))
            assert response.results[0].outcome == AbortOutcome.ABORTED
            assert (await bob)[-1].outputs[0].finish_reason == types_pb2.FINISH_REASON_ABORT
            assert f.service.num_requests == 1 and not alice.done()
            await f.stub.Abort(abort, metadata=bearer(ALICE))
            assert (await alice)[-1].outputs[0].finish_reason == types_pb2.FINISH_REASON_ABORT

    run(scenario())


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Kubernetes does it, by another target of a link; a wrong file, or none, leaves the keys as they were."""
    caplog.set_level(logging.INFO)
    for name, text in (("one", TEXT), ("two", f"carol:{NEW}\nalice:{ALICE}\n"), ("bad", f"carol {NEW}")):
        (tmp_path / name).write_text(text)

    def point_to(name: str) -> None:
        (tmp_path / "next").symlink_to(name)
        os.replace(tmp_path / "next", tmp_path / "keys")

    point_to("one")
    keys = ApiKeys(str(tmp_path / "keys"))
    assert (keys.name_of(ALICE), keys.name_of(BOB), keys.name_of(NEW)) == ("alice", "bob", None)
    point_to("two")
    assert (keys.name_of(ALICE), keys.name_of(BOB), keys.name_of(NEW)) == ("alice", None, "carol")
    point_to("bad")
    assert (keys.name_of(ALICE), keys.name_of(NEW)) == ("alice", "carol")
    os.unlink(tmp_path / "keys")
    assert keys.name_of(NEW) == "carol"
    point_to("one")
    assert (keys.name_of(BOB), keys.name_of(NEW)) == ("bob", None)
    assert caplog.text.count("stay as they were") == 1
    assert "key-0123456789" not in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key"),
        ("# alice:0123456789abcdef", "has no key"),
        ("alice", "line 1: must be name:key"),
        ("\nalice:short", "line 2: the key of 'alice' must have 16"),
        ("alice:0123456789 abcdef", "no blank"),
        ("al ice:0123456789abcdef", "a name has"),
        (f"alice:{ALICE}\nbob:{ALICE}", "line 2: the key of 'bob' is another name's"),
    ],
)
def test_bad_files_are_explained(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse_keys(text, "keys")
    assert "0123456789" not in str(caught.value)


def test_one_name_may_have_two_keys() -> None:
    assert sorted(parse_keys(f"alice:{ALICE}\nalice:{NEW}", "keys").values()) == ["alice", "alice"]
