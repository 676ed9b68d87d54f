"""A worker that is told to shut down while its core goes on: what runs ends well, and a new worker takes over."""

from __future__ import annotations

import asyncio

import grpc

from tests.core_edge.harness import Core, Frontend, engine_request, eventually, refused, with_core
from tests.core_edge.worker_server import Script, ScriptedWorker, expected_tokens


def test_requests_end_well_and_new_ones_wait_for_the_next_worker() -> None:
    """Case: llm-d-router#1885"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        request = engine_request(1, max_tokens=60)
        await frontend.add(request)
        await frontend.reads(lambda: len(frontend.tokens[1]) > 3)
        worker = core.worker
        await worker._server.set_ready(True)
        await asyncio.sleep(0.1)
        await worker._server.set_ready(False)
        await eventually(lambda: bool(core.process._servicer.unavailable))
        assert "worker is shutting down" in await refused(frontend.add(engine_request(2)), grpc.StatusCode.UNAVAILABLE)
        await frontend.ended(1)
        assert frontend.tokens[1] == expected_tokens(request)
        port = worker._server.port
        await worker.stop()
        next_worker = ScriptedWorker(core.script, port=port)
        await next_worker.start()
        try:
            await eventually(lambda: not core.process._servicer.unavailable)
            await frontend.add(engine_request(3))
            await frontend.ended(3)
        finally:
            await next_worker.stop()

    with_core(body, Script(step_s=0.01))


def test_a_core_that_shuts_down_too_goes_on_with_its_worker() -> None:
    """The lame duck's time is the core's own: it takes requests as long as it said."""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await core.worker._server.set_ready(True)
        await asyncio.sleep(0.1)
        await core.process._server.set_ready(True)
        ducking = asyncio.create_task(core.process.lame_duck())
        await core.worker._server.set_ready(False)
        await asyncio.sleep(0.3)
        await frontend.add(engine_request(1))
        await frontend.ended(1)
        await ducking
        await frontend.add(engine_request(2))
        await frontend.ended(2)

    with_core(body, lame_duck_s=0.6)
