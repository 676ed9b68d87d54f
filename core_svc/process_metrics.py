"""What a core process measures, wired up: empty-handed where nobody asked for metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio

from core_svc.engine import EngineCore
from core_svc.metrics import EngineMetrics
from core_svc.observer import EngineObserver
from core_svc.settings import CoreSettings
from core_svc.state_metrics import StateMetrics, WorkerState
from pagewire.runtime.metrics import ServiceMetrics
from pagewire.runtime.rpc_metrics import RpcClientMetrics, RpcServerMetrics


class CoreMetrics(ServiceMetrics):
    """The parts go to where they watch: `interceptors`, `client`, `observers`; `worker` is told of the worker."""

    def __init__(
        self,
        settings: CoreSettings,
        incarnation: str,
        *,
        is_ready: Callable[[], bool],
        num_frontends: Callable[[], int],
    ) -> None:
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
        self.client: RpcClientMetrics | None = None
        self.observers: Sequence[EngineObserver] = ()
        self.worker = WorkerState()
        self._state: StateMetrics | None = None
        super().__init__("core", incarnation, settings, is_ready=is_ready)
        instruments = self.instruments
        if instruments is not None:
            self.interceptors = (RpcServerMetrics(instruments, counts_messages=True),)
            self.client = RpcClientMetrics(instruments, "worker")
            self.observers = (EngineMetrics(instruments),)
            self._state = StateMetrics(instruments, self.worker, settings.worker, num_frontends)

    def watch(self, engine: EngineCore) -> None:
        """There is an engine now."""
        if self._state is not None:
            self._state.engine = engine
