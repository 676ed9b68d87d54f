"""A frontend over several cores, each over the fake executor and behind gRPC, for the tests of such."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

from frontend_support import (
    SEED,
    CoreOptions,
    GrpcCore,
    eventually,
)

from core_svc.fake_executor import FakeOptions
from frontend_svc.core_targets import Target
from frontend_svc.server import SERVICE_NAME, FrontendServer, core_connects
from frontend_svc.service import TextService
from frontend_svc.settings import FrontendSettings
from pagewire.engine import Pause, PauseMode, Resume
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.sampling import SamplingParams
from pagewire.v1 import frontend_pb2_grpc, types_pb2

Files = Mapping[str, bytes]
SETTINGS = FrontendSettings()


@dataclass
class Many:
    """A frontend and its cores by address."""

    stub: frontend_pb2_grpc.FrontendServiceStub
    service: TextService
    server: FrontendServer
    cores: dict[str, GrpcCore]
    ready: list[bool]

    def keep(self, *addresses: str) -> None:
        self.service.cores.keep(core_connects(SETTINGS, {address: Target(address) for address in addresses}))

    async def connected(self, num_cores: int) -> None:
        await eventually(lambda: len(self.service.cores.sessions) == num_cores, 30)

    @property
    def num_requests(self) -> dict[str, int]:
        return {session.name: session.num_requests for session in self.service.cores.sessions}

    def of(self, session_name: str) -> GrpcCore:
        return self.cores[session_name]

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Meanwhile the cores take requests and run none."""
        for core in self.cores.values():
            await asyncio.wrap_future(core.engine.utility(Pause(PauseMode.KEEP)))
        yield
        for core in self.cores.values():
            await asyncio.wrap_future(core.engine.utility(Resume()))

    async def is_idle(self) -> None:
        await eventually(lambda: self.service.num_requests == 0)
        for session in self.service.cores.sessions:
            await eventually(lambda session=session: len(session.outputs) == 0 and session.load == 0)  # type: ignore[misc]
            assert session.num_requests == 0


def slow(latency_s: float = 0.01, **more: object) -> CoreOptions:
    return CoreOptions(options=FakeOptions(latency_s=latency_s), **more)  # type: ignore[arg-type]


async def start_core(files: Files, options: CoreOptions, **model: object) -> tuple[str, GrpcCore]:
    core = GrpcCore(files, options)
    if model:
        assert core.servicer.serving is not None
        info = replace(core.info, model=replace(core.info.model, **model))  # type: ignore[arg-type]
        core.info, core.servicer.serving = info, replace(core.servicer.serving, info=info)
    return await core.start(), core


@contextlib.asynccontextmanager
async def many(files: Files, *options: CoreOptions) -> AsyncIterator[Many]:
    cores = dict([await start_core(files, each) for each in options])
    ready: list[bool] = []

    async def on_ready(is_ready: bool) -> None:
        ready.append(is_ready)

    service = TextService(on_ready=on_ready)
    server = FrontendServer(service, GrpcServer([SERVICE_NAME]))
    port = await server.start()
    try:
        async with secure_or_insecure_channel(f"127.0.0.1:{port}") as channel:
            found = Many(frontend_pb2_grpc.FrontendServiceStub(channel), service, server, cores, ready)
            found.keep(*cores)
            await found.connected(len(options))
            yield found
    finally:
        await server.stop(0)
        for core in cores.values():
            await core.stop()


def prompt(start: int, num_tokens: int = 64) -> types_pb2.TokenIds:
    return types_pb2.TokenIds(ids=range(1000 + start, 1000 + start + num_tokens))


def expected(core: GrpcCore, ids: types_pb2.TokenIds, num_tokens: int, **params: object) -> list[int]:
    return core.executor.model.generate(list(ids.ids), SamplingParams(seed=SEED, **params), num_tokens)  # type: ignore[arg-type]
