"""The life of a worker process: listen, load a model if asked to, serve, let the core that holds it finish."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.logs import set_incarnation
from pagewire.runtime.ready import print_ready
from pagewire.runtime.server import GrpcServer, wait_for_signal
from pagewire.runtime.tracing import start_tracing, stop_telemetry, stop_tracing
from worker_svc.compute import ComputeThread
from worker_svc.process_metrics import WorkerMetrics
from worker_svc.server import SERVICE_NAME, WorkerServicer, add_servicer
from worker_svc.settings import WorkerSettings
from worker_svc.trace_observer import TraceObserver
from worker_svc.worker import Worker

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer

logger = logging.getLogger("worker_svc")
CORE_MARGIN_S = 3.0
"""A core that got its signal at the same moment drains for as long, and then needs a step more to end the rest."""


async def serve(settings: WorkerSettings, compute: ComputeThread) -> int:
    """Serves until a signal; returns the exit status."""
    incarnation = new_incarnation()
    set_incarnation(incarnation)
    tracer = start_tracing("worker", incarnation)
    try:
        return await _serve(settings, compute, incarnation, tracer)
    finally:
        await stop_tracing(tracer)


async def _serve(settings: WorkerSettings, compute: ComputeThread, incarnation: str, tracer: Tracer | None) -> int:
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
    metrics = WorkerMetrics(
        settings,
        incarnation,
        worker,
        is_ready=lambda: server.is_ready,
        has_core=lambda: servicer.has_core,
    )
    server = GrpcServer.for_settings(SERVICE_NAME, settings, metrics.interceptors)
    observers = [TraceObserver(tracer, worker.device)] if tracer is not None else []
    servicer = WorkerServicer(worker, compute, incarnation, observers, metrics.steps)
    add_servicer(servicer, server.aio)
    metrics.start()
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
    await stop_telemetry(tracer, metrics.close)
    return 0


def _num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
