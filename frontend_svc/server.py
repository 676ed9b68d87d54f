"""FrontendService over gRPC: messages to the text service and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio

from frontend_svc import wire
from frontend_svc.access_log import AccessLog
from frontend_svc.api_keys import ApiKeys
from frontend_svc.auth_wire import AuthInterceptor, key_name
from frontend_svc.core_client import GrpcCoreClient
from frontend_svc.core_pool import Connect
from frontend_svc.core_targets import Target, follow
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.input_processor import TextRequest
from frontend_svc.observer import RequestObserver
from frontend_svc.outputs import RequestOutput
from frontend_svc.process_metrics import FrontendMetrics
from frontend_svc.service import TextService
from frontend_svc.settings import FrontendSettings
from frontend_svc.trace_observer import TraceObserver
from pagewire.engine import TraceContext
from pagewire.errors import InvalidArgumentError, PagewireError, violation
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.logs import set_incarnation
from pagewire.runtime.process_stats import process_stats
from pagewire.runtime.ready import print_ready
from pagewire.runtime.server import GrpcServer, wait_for_signal
from pagewire.runtime.tracing import start_tracing, stop_telemetry, stop_tracing
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import frontend_pb2_grpc

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer

log = logging.getLogger(__name__)

SERVICE_NAME = "pagewire.v1.FrontendService"
SHUTDOWN_MARGIN_S = 2.0
MAX_BYTES_READ_ON_LOOP = 64 * 2**10
"""Larger conversations are read on a thread: millions of messages or JSON values take long."""
Context = grpc.aio.ServicerContext[Any, Any]


def _remaining_s(context: Context) -> float | None:
    """Time until the caller's deadline; None where it set none (gRPC then says a very large number or None)."""
    remaining = context.time_remaining()
    return None if remaining is None or remaining > 10 * 365 * 86400 else max(0.0, remaining)


def _trace_context(context: Context) -> TraceContext | None:
    found = {key: value for key, value in context.invocation_metadata() or () if key in ("traceparent", "tracestate")}
    parent = found.get("traceparent")
    if not isinstance(parent, str):
        return None
    return TraceContext(parent, str(found.get("tracestate", "")))


class FrontendServicer(frontend_pb2_grpc.FrontendServiceServicer):
    """The service. Errors leave as PagewireErrors; the server's interceptor makes statuses of them."""

    def __init__(self, service: TextService, keys: ApiKeys | None = None, incarnation: str = "") -> None:
        self._service = service
        self._keys = keys
        self._incarnation = incarnation

    def _owner(self, context: Context) -> str:
        return key_name(self._keys, context.invocation_metadata())

    def _refuse(self, request: pb.GenerateRequest | pb.ChatRequest, context: Context, error: PagewireError) -> None:
        unread = wire.unread_request(request, _trace_context(context))
        unread.api_key = self._owner(context)
        self._service.refuse(unread, error)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Streams; a cancelled call ends the request in the core."""
        arguments = (request, _remaining_s(context), _trace_context(context))
        try:
            text_request = wire.text_request_from_generate(*arguments)
        except PagewireError as error:
            self._refuse(request, context, error)
            raise
        await self._respond(text_request, pb.GenerateResponse(), context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Streams; a cancelled call ends the request in the core."""
        arguments = (request, _remaining_s(context), _trace_context(context))
        try:
            if request.ByteSize() <= MAX_BYTES_READ_ON_LOOP:
                text_request = wire.text_request_from_chat(*arguments)
            else:
                text_request = await self._service.off_loop(wire.text_request_from_chat, *arguments)
        except PagewireError as error:
            self._refuse(request, context, error)
            raise
        await self._respond(text_request, pb.ChatResponse(), context)

    async def _respond(self, request: TextRequest, message: wire.Response, context: Context) -> None:
        """Sends the outputs, each in the same message: gRPC has its bytes before the next one is filled in.

        With `context.write` and not as a generator, so that the outbox starts the writes of all calls in one go.
        """

        def write(output: RequestOutput) -> Coroutine[Any, Any, None]:
            return context.write(wire.fill_response(message, output))

        request.api_key = self._owner(context)
        try:
            await self._service.respond(request, write)
        except grpc.aio.BaseError as error:
            # What a write says once the call is over.
            raise asyncio.CancelledError from error

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """UNIMPLEMENTED: no pooling model is served."""
        self._service.embed(request.model)
        return pb.EmbedResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Ids of a text or a conversation."""
        match request.WhichOneof("input"):
            case "text":
                prompt: Any = request.text
            case "conversation":
                prompt = await self._service.off_loop(wire.conversation_from_tokenize, request.conversation)
            case _:
                raise InvalidArgumentError([violation("input", None, "one of text and conversation must be set")])
        ids, texts, max_model_len = await self._service.tokenize(
            prompt,
            model=request.model,
            add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
            returns_token_strings=request.return_token_strings,
        )
        return pb.TokenizeResponse(token_ids=ids, token_strings=texts, max_model_len=max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Text of ids."""
        text = await self._service.detokenize(
            request.token_ids, model=request.model, skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """One outcome per id."""
        return wire.abort_response(request.request_ids, self._service.abort(request.request_ids, self._owner(context)))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """The model."""
        return pb.GetModelResponse(model=wire.served_model_to_proto(self._service.served_model(request.model)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """All one of them."""
        return pb.ListModelsResponse(models=[wire.served_model_to_proto(self._service.served_model())])

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Of this process."""
        stats = replace(self._service.stats(), process=process_stats(self._incarnation))
        return wire.stats_to_proto(stats)


class FrontendServer:
    """A frontend: the gRPC server and the text service behind it, started and stopped together."""

    def __init__(
        self,
        service: TextService,
        server: GrpcServer,
        *work: Callable[[], Coroutine[Any, Any, None]],
        keys: ApiKeys | None = None,
        incarnation: str = "",
    ) -> None:
        """`work`: what runs beside them, such as looking cores up; it may end, but not fail.

        With `keys` ids of requests are each key's own; the server's AuthInterceptor must have the same.
        """
        self.service = service
        self.server = server
        self._work = work
        self._tasks: list[asyncio.Task[None]] = []
        frontend_pb2_grpc.add_FrontendServiceServicer_to_server(
            FrontendServicer(service, keys, incarnation), server.aio
        )

    async def start(self) -> int:
        """Listens and begins to look for cores; returns the port."""
        port = await self.server.start()
        self._tasks = [asyncio.ensure_future(work) for work in (self.service.run(), *(begin() for begin in self._work))]
        return port

    async def wait_stopped(self) -> None:
        """Waits until something fails, which it only does by a fault of its own. Raises that."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self, grace_s: float) -> None:
        """Not ready, no new calls; running ones may end for `grace_s` seconds, the rest ends with UNAVAILABLE."""
        server_stop = asyncio.create_task(self.server.drain(grace_s + SHUTDOWN_MARGIN_S))
        await self.service.drain(grace_s)
        await server_stop
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.service.close()


def core_connects(
    settings: FrontendSettings, targets: Mapping[str, Target], metrics: FrontendMetrics | None = None
) -> dict[str, Connect]:
    """How to connect to each core. A new incarnation every time: what an old one left there ends with its lease."""

    async def connect(target: Target) -> EngineCoreClient:
        return await GrpcCoreClient.connect(
            target.address,
            new_incarnation(),
            settings.tls,
            max_message_bytes=settings.max_message_bytes,
            server_name=target.server_name,
            links=metrics.links if metrics is not None else None,
            metrics=metrics.client if metrics is not None else None,
        )

    return {name: partial(connect, target) for name, target in targets.items()}


async def serve(settings: FrontendSettings, keys: ApiKeys | None = None) -> int:
    """Runs a frontend until SIGINT or SIGTERM, then drains. Returns the exit status."""
    incarnation = new_incarnation()
    set_incarnation(incarnation)
    tracer = start_tracing("frontend", incarnation)
    try:
        return await _serve(settings, keys, incarnation, tracer)
    finally:
        await stop_tracing(tracer)


async def _serve(settings: FrontendSettings, keys: ApiKeys | None, incarnation: str, tracer: Tracer | None) -> int:
    if keys is not None and settings.tls is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("API keys travel in the clear: there is no TLS (--tls-cert-file, --tls-key-file)")
    guards = [] if keys is None else [AuthInterceptor(SERVICE_NAME, keys)]
    metrics = FrontendMetrics(settings, incarnation, is_ready=lambda: server.is_ready)
    server = GrpcServer.for_settings(SERVICE_NAME, settings, [*metrics.interceptors, *guards])
    metrics.start()
    has_printed = False

    async def on_ready(is_ready: bool) -> None:
        nonlocal has_printed
        await server.set_ready(is_ready)
        if is_ready and not has_printed:
            has_printed = True
            print_ready("frontend", settings.host, server.port, incarnation)

    observers: list[RequestObserver] = [*metrics.observers]
    if tracer is not None:
        observers.append(TraceObserver(tracer, settings.host, lambda: server.port))
    if settings.log_requests:
        observers.append(AccessLog())
    service = TextService(max_tokens_behind=settings.max_tokens_behind, on_ready=on_ready, observers=observers)

    def follow_cores() -> Coroutine[Any, Any, None]:
        return follow(settings.core, lambda targets: service.cores.keep(core_connects(settings, targets, metrics)))

    frontend = FrontendServer(service, server, follow_cores, keys=keys, incarnation=incarnation)
    port = await frontend.start()
    log.info("listening on %s:%d, core at %s", settings.host, port, ", ".join(settings.core))
    signal_task = asyncio.create_task(wait_for_signal())
    failure_task = asyncio.create_task(frontend.wait_stopped())
    await asyncio.wait([signal_task, failure_task], return_when=asyncio.FIRST_COMPLETED)
    if failure_task.done():
        log.critical("the service failed", exc_info=failure_task.exception())
        await server.drain(0)
        return 1
    log.info("%s: draining for up to %g s", signal_task.result().name, settings.drain_s)
    await server.lame_duck(settings.lame_duck_s)
    failure_task.cancel()
    await frontend.stop(settings.drain_s)
    await stop_telemetry(tracer, metrics.close)
    return 0
