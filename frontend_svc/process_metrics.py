"""What a frontend process measures, wired up: empty-handed where nobody asked for metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio

from frontend_svc.metrics import CoreLinks, RequestMetrics
from frontend_svc.observer import RequestObserver
from pagewire.runtime.metrics import ServiceMetrics
from pagewire.runtime.rpc_metrics import RpcClientMetrics, RpcServerMetrics
from pagewire.runtime.settings import CommonSettings


class FrontendMetrics(ServiceMetrics):
    """The parts go to where they watch: `interceptors`, `observers`; `links` and `client` to the clients of cores."""

    def __init__(self, settings: CommonSettings, incarnation: str, *, is_ready: Callable[[], bool]) -> None:
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
        self.observers: Sequence[RequestObserver] = ()
        self.links: CoreLinks | None = None
        self.client: RpcClientMetrics | None = None
        super().__init__("frontend", incarnation, settings, is_ready=is_ready)
        instruments = self.instruments
        if instruments is not None:
            # Not their messages: there is one per token.
            self.interceptors = (RpcServerMetrics(instruments, counts_messages=False),)
            self.observers = (RequestMetrics(instruments),)
            self.links, self.client = CoreLinks(instruments), RpcClientMetrics(instruments, "core")
