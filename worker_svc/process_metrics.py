"""What a worker process measures, wired up: empty-handed where nobody asked for metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio
import torch

from pagewire.runtime.metrics import ServiceMetrics
from pagewire.runtime.process_stats import resident_bytes
from pagewire.runtime.rpc_metrics import RpcServerMetrics
from worker_svc.memory import available_bytes, device_named
from worker_svc.metrics import StepMetrics, add_worker_state
from worker_svc.settings import WorkerSettings
from worker_svc.worker import Worker


class WorkerMetrics(ServiceMetrics):
    """The parts go to where they watch: `interceptors` to the server, `steps` to the servicer."""

    def __init__(
        self,
        settings: WorkerSettings,
        incarnation: str,
        worker: Worker,
        *,
        is_ready: Callable[[], bool],
        has_core: Callable[[], bool],
    ) -> None:
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
        self.steps: StepMetrics | None = None
        super().__init__("worker", incarnation, settings, is_ready=is_ready)
        instruments = self.instruments
        if instruments is not None:
            device = device_named(settings.device)
            self.interceptors = (RpcServerMetrics(instruments, counts_messages=True),)
            self.steps = StepMetrics(instruments)
            is_cuda = device.type == "cuda"

            def memory() -> tuple[int, int]:
                used = int(torch.cuda.memory_reserved(device)) if is_cuda else resident_bytes()
                return available_bytes(device), used

            add_worker_state(instruments, worker, has_core, memory)
