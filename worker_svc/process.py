"""The life of a worker process: listen, load a model if asked to, serve, let the core that holds it finish."""

from __future__ import annotations

import asyncio
import logging
import os

from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.logs import set_incarnation
from pagewire.runtime.ready import print_ready
from pagewire.runtime.server import GrpcServer, wait_for_signal
from worker_svc.compute import ComputeThread
from worker_svc.server import SERVICE_NAME, WorkerServicer, add_servicer
from worker_svc.settings import WorkerSettings
from worker_svc.worker import Worker

logger = logging.getLogger("worker_svc")
CORE_MARGIN_S = 3.0
"""A core that got its signal at the same moment drains for as long, and then needs a step more to end the rest."""


async def serve(settings: WorkerSettings, compute: ComputeThread) -> int:
    """Serves until a signal; returns the exit status."""
    incarnation = new_incarnation()
    set_incarnation(incarnation)
    worker = Worker(
        settings.device,
        settings.model,
        settings.kv_cache_memory,
        default_dtype=settings.dtype,
        default_quantization=settings.quantization,
        default_max_model_len=settings.max_model_len,
        num_threads=settings.num_threads or _num_cores(),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cuda_graphs=settings.cuda_graphs,
    )
    server = GrpcServer.for_settings(SERVICE_NAME, settings)
    servicer = WorkerServicer(worker, compute, incarnation)
    add_servicer(servicer, server.aio)
    port = await server.start()
    signalled = asyncio.ensure_future(wait_for_signal())
    if settings.preload:
        loading = asyncio.wrap_future(compute.submit(worker.load_model))
        await asyncio.wait((signalled, loading), return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done() and loading.exception() is not None:
            await server.drain(0.0)
            await loading
    if not signalled.done():
        await server.set_ready(True)
        print_ready("worker", settings.host, port, incarnation)
        await signalled
    logger.info("signal received: a core that has work here gets up to %g s for it", settings.drain_s)
    await server.lame_duck(settings.lame_duck_s)
    await servicer.shut_down(settings.drain_s + CORE_MARGIN_S)
    await server.drain(1.0)
    return 0


def _num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
