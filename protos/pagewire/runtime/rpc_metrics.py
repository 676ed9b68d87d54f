"""How long gRPC calls take, how they end, and the bytes of their messages: on a server's side and on a client's."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from pagewire.errors import PagewireError
from pagewire.runtime.instruments import RPC_SECONDS, Counter, Histogram, Instruments
from pagewire.runtime.status import from_rpc_error

SYSTEM = "grpc"
_CALL_LABELS = ("rpc_system_name", "rpc_method", "rpc_response_status_code")
_BYTES_LABELS = ("rpc_method", "direction")
_NOT_COUNTED = ("grpc.health.", "grpc.reflection.")


class _Calls:
    """The duration of calls by method and code."""

    def __init__(self, histogram: Histogram, method: str) -> None:
        self._histogram, self._method = histogram, method

    def note(self, started: float, code: str) -> None:
        """A call has ended."""
        self._histogram.observe(time.monotonic() - started, (SYSTEM, self._method, code))


class _Messages:
    """Counts the bytes of messages as they are made and read: nothing is encoded for it."""

    def __init__(self, num_bytes: Counter, num_messages: Counter, method: str) -> None:
        self._bytes, self._messages, self._method = num_bytes, num_messages, method

    def counted(self, convert: Callable[[Any], Any] | None, direction: str) -> Callable[[Any], Any]:
        """A serializer (direction sent) or deserializer (received) that counts."""
        labels, num_bytes, num_messages = (self._method, direction), self._bytes.add, self._messages.add
        is_sent = direction == "sent"

        def call(message: Any) -> Any:
            converted = message if convert is None else convert(message)
            num_bytes(len(converted if is_sent else message), labels)
            num_messages(1, labels)
            return converted

        return call


class RpcServerMetrics(grpc.aio.ServerInterceptor):
    """A server's calls. Belongs behind the interceptor that makes statuses of errors, for it looks at the errors.

    Health and reflection are not counted.
    """

    def __init__(self, instruments: Instruments, *, counts_messages: bool) -> None:
        """counts_messages: whether each message is counted; not where there is one per token."""
        self._durations = instruments.histogram(
            "rpc_server_call_duration_seconds",
            "Calls from their start to their end, streams too (OpenTelemetry: rpc.server.call.duration).",
            RPC_SECONDS,
            _CALL_LABELS,
        )
        self._errors = instruments.counter(
            "pagewire_rpc_server_errors_total",
            "Calls that this service refused or failed, by gRPC code and google.rpc.ErrorInfo reason.",
            ("rpc_method", "code", "reason"),
        )
        self._bytes = self._messages = None
        if counts_messages:
            self._bytes, self._messages = _message_counters(instruments, "server", "this service received and sent")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method.lstrip("/")
        if handler is None or method.startswith(_NOT_COUNTED):
            return handler  # type: ignore[no-any-return]
        ways = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        make = getattr(grpc, f"{ways[0]}_{ways[1]}_rpc_method_handler")
        behavior = getattr(handler, f"{ways[0]}_{ways[1]}")
        is_generator = inspect.isasyncgenfunction(behavior)
        wrapped = (self._generator if is_generator else self._call)(behavior, method)
        read, write = handler.request_deserializer, handler.response_serializer
        if self._bytes is not None and self._messages is not None:
            messages = _Messages(self._bytes, self._messages, method)
            read, write = messages.counted(read, "received"), messages.counted(write, "sent")
        return make(wrapped, read, write)  # type: ignore[no-any-return]

    def _call(self, behavior: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        calls = _Calls(self._durations, method)

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = time.monotonic()
            try:
                response = await behavior(request, context)
            except BaseException as error:
                calls.note(started, self._code(error, method))
                raise
            calls.note(started, "OK")
            return response

        return call

    def _generator(self, behavior: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
        calls = _Calls(self._durations, method)

        async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            started = time.monotonic()
            try:
                async with aclosing(behavior(request, context)) as responses:  # type: ignore[type-var]
                    async for response in responses:
                        yield response
            except BaseException as error:
                calls.note(started, self._code(error, method))
                raise
            calls.note(started, "OK")

        return generate

    def _code(self, error: BaseException, method: str) -> str:
        """The code that the caller gets."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return "CANCELLED"
        if isinstance(error, grpc.RpcError):
            error = from_rpc_error(error)
        code, reason = (error.code, error.reason) if isinstance(error, PagewireError) else ("INTERNAL", "INTERNAL")
        self._errors.add(1, (method, code, reason))
        return code


class RpcClientMetrics:
    """A client's calls: `sync` and `aio` give what stands for a channel where a stub is made."""

    def __init__(self, instruments: Instruments, peer: str) -> None:
        """`peer`: who is called, for the descriptions."""
        self._durations = instruments.histogram(
            "rpc_client_call_duration_seconds",
            f"Unary calls to the {peer} (OpenTelemetry: rpc.client.call.duration).",
            RPC_SECONDS,
            _CALL_LABELS,
        )
        self._bytes, self._messages = _message_counters(instruments, "client", f"sent to and received from the {peer}")

    def sync(self, channel: grpc.Channel) -> Any:
        """A blocking channel, measured."""
        return _Channel(self, channel, is_aio=False)

    def aio(self, channel: grpc.aio.Channel) -> Any:
        """An asyncio channel, measured."""
        return _Channel(self, channel, is_aio=True)

    def messages(self, method: str) -> _Messages:
        """The counters of one method's messages."""
        return _Messages(self._bytes, self._messages, method)

    def timed(self, call: Callable[..., Any], method: str, is_aio: bool) -> Callable[..., Any]:
        """A unary call that notes how long it took. To be awaited at once, not to be cancelled by its call object."""
        calls = _Calls(self._durations, method)

        def blocking(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                response = call(*args, **kwargs)
            except grpc.RpcError as error:
                calls.note(started, error.code().name)
                raise
            calls.note(started, "OK")
            return response

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                response = await call(*args, **kwargs)
            except grpc.RpcError as error:
                calls.note(started, error.code().name)
                raise
            except asyncio.CancelledError:
                calls.note(started, "CANCELLED")
                raise
            calls.note(started, "OK")
            return response

        return awaited if is_aio else blocking


class _Channel:
    """What a generated stub asks of a channel."""

    def __init__(self, metrics: RpcClientMetrics, channel: Any, *, is_aio: bool) -> None:
        self._metrics, self._channel, self._is_aio = metrics, channel, is_aio

    def _make(self, kind: str, method: str, write: Any, read: Any, more: dict[str, Any]) -> Any:
        messages = self._metrics.messages(method.lstrip("/"))
        return getattr(self._channel, kind)(
            method,
            request_serializer=messages.counted(write, "sent"),
            response_deserializer=messages.counted(read, "received"),
            **more,
        )

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **more: Any) -> Any:
        call = self._make("unary_unary", method, request_serializer, response_deserializer, more)
        return self._metrics.timed(call, method.lstrip("/"), self._is_aio)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **more: Any) -> Any:
        return self._make("unary_stream", method, request_serializer, response_deserializer, more)

    def stream_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **more: Any) -> Any:
        return self._make("stream_unary", method, request_serializer, response_deserializer, more)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **more: Any) -> Any:
        return self._make("stream_stream", method, request_serializer, response_deserializer, more)


def _message_counters(instruments: Instruments, side: str, what: str) -> tuple[Counter, Counter]:
    return (
        instruments.counter(f"pagewire_rpc_{side}_bytes_total", f"Bytes of messages {what}.", _BYTES_LABELS, "bytes"),
        instruments.counter(f"pagewire_rpc_{side}_messages_total", f"Messages {what}.", _BYTES_LABELS),
    )
