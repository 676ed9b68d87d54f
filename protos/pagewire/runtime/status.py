"""Errors on the wire: PagewireError to gRPC status with google.rpc details, and back."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagewire import errors
from pagewire.errors import (
    FieldViolation,
    InvalidArgumentError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.runtime.transport import MESSAGE_LIMIT_SETTING

DOMAIN = "pagewire"
"""`domain` of every ErrorInfo that we send."""

_MAX_MESSAGE_BYTES = 1_500
_MAX_DETAILS_BYTES = 3_000
# Status and details travel as trailing metadata, and peers cut calls off whose metadata is above 8 KiB.

_FOUND = " (found "
_CLASSES: dict[str, type[PagewireError]] = {
    cls.code: cls
    for cls in (
        errors.AlreadyExistsError,
        errors.UnauthenticatedError,
        errors.NotFoundError,
        errors.FailedPreconditionError,
        errors.ResourceExhaustedError,
        errors.UnavailableError,
        errors.AbortedError,
        errors.DeadlineExceededError,
        errors.UnimplementedError,
        errors.InternalError,
    )
}

logger = logging.getLogger(__name__)


def to_status(error: PagewireError) -> grpc.Status:
    """The gRPC status of an error, with ErrorInfo and, where they apply, BadRequest and RetryInfo."""
    code: grpc.StatusCode = grpc.StatusCode[error.code]
    status = status_pb2.Status(code=code.value[0], message=_shorten(error.message))
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata={k: _shorten(v, 200) for k, v in error.metadata.items()}
        )
    ]
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidArgumentError):
        details.append(_bad_request(error.violations))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)  # type: ignore[no-any-return]


def _bad_request(violations: list[FieldViolation]) -> Any:
    bad_request = error_details_pb2.BadRequest()
    for violation in violations:
        description = f"{violation.limit}{_FOUND}{violation.value})"
        bad_request.field_violations.add(field=_shorten(violation.field, 300), description=_shorten(description, 500))
        if bad_request.ByteSize() > _MAX_DETAILS_BYTES:
            break
    return bad_request


def _shorten(text: str, max_bytes: int = _MAX_MESSAGE_BYTES) -> str:
    """The text as valid UTF-8, cut so that it stays within `max_bytes` when percent-encoded."""
    # Every character takes a byte or more; cut first, for the text may be as long as a message.
    whole, text = len(text), text[: max_bytes + 1].encode("utf-8", "replace").decode()
    if whole <= max_bytes and len(quote(text)) <= max_bytes:
        return text
    while len(quote(text)) > max_bytes - 3:
        text = text[: -max(1, (len(quote(text)) - max_bytes) // 12)]
    return text + "..."


def from_rpc_error(error: grpc.RpcError) -> PagewireError:
    """The PagewireError that a failed call carries: class by code, with violations, reason and retry hint."""
    code: grpc.StatusCode = error.code()
    message = str(error.details() or code.name)
    info, violations, retry_after_s = _read_details(error)
    metadata = dict(info.metadata) if info is not None else {}
    reason = info.reason if info is not None else code.name
    if info is None:
        message = _explain(code, message)
    found: PagewireError
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        found = InvalidArgumentError(violations, reason=reason)
        found.message, found.args = message, (message,)
        found.metadata = metadata
        return found
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        found = ResourceExhaustedError(message, retry_after_s=retry_after_s, reason=reason)
    elif code is grpc.StatusCode.UNAVAILABLE:
        found = UnavailableError(message, retry_after_s=retry_after_s, reason=reason)
    elif code is grpc.StatusCode.CANCELLED:
        found = errors.AbortedError(message, reason=reason)
    else:
        found = _CLASSES.get(code.name, errors.InternalError)(message, reason=reason)
    found.metadata = metadata
    return found


def _read_details(error: grpc.RpcError) -> tuple[Any, list[FieldViolation], float | None]:
    info, violations, retry_after_s = None, [], None
    trailers: Any = error.trailing_metadata()
    for key, value in trailers or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value)
            for packed in status.details:
                if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    info = error_details_pb2.ErrorInfo.FromString(packed.value)
                elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    delay = error_details_pb2.RetryInfo.FromString(packed.value).retry_delay
                    retry_after_s = delay.ToNanoseconds() / 1e9
                elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                    bad_request = error_details_pb2.BadRequest.FromString(packed.value)
                    violations = [_violation(v.field, v.description) for v in bad_request.field_violations]
        except (DecodeError, ValueError):  # details of somebody else's making
            logger.debug("unreadable status details", exc_info=True)
    return info, violations, retry_after_s


def _violation(field: str, description: str) -> FieldViolation:
    limit, _, value = description.partition(_FOUND)
    return FieldViolation(field, value.removesuffix(")"), limit)


def _explain(code: grpc.StatusCode, message: str) -> str:
    """Adds what to do about errors that gRPC itself words for its own developers."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return f"{message}; the limit is set by {MESSAGE_LIMIT_SETTING} on both ends"
    if "Failed parsing HTTP/2" in message or "http1.x server" in message:
        return (
            f"the port speaks something else than gRPC, such as HTTP/1: give a Pagewire service's gRPC port ({message})"
        )
    return message


class _Unreadable:
    """Stands for a request that is no message; gRPC itself would answer UNKNOWN with a Python exception's text."""


def _guarded(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _Unreadable()

    return deserialize


def _readable(request: Any) -> Any:
    """The request, or the stream of requests. Raises InvalidArgumentError for (in the stream: at) an unreadable one."""
    if isinstance(request, _Unreadable):
        raise InvalidArgumentError([FieldViolation("request", "no message of its type", "must be protobuf")])
    return _readable_stream(request) if isinstance(request, AsyncIterator) else request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of handlers into statuses: PagewireError by `to_status`, anything else into INTERNAL.

    Cancellation and `context.abort` pass. An unexpected exception is logged with its traceback; the caller gets a
    message without internals.
    """

    def __init__(self, service: str) -> None:
        self._service = service

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.request_streaming:
            make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else None
            make = make or grpc.stream_unary_rpc_method_handler
            behavior: Any = handler.stream_stream or handler.stream_unary
        else:
            make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else None
            make = make or grpc.unary_unary_rpc_method_handler
            behavior = handler.unary_stream or handler.unary_unary
        wrapped = (
            self._stream(behavior, method) if inspect.isasyncgenfunction(behavior) else self._call(behavior, method)
        )
        return make(wrapped, _guarded(handler.request_deserializer), handler.response_serializer)

    def _call(self, behavior: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await behavior(_readable(request), context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await self._abort(error, method, context)

        return call

    def _stream(self, behavior: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with aclosing(behavior(_readable(request), context)) as responses:  # type: ignore[type-var]
                    async for response in responses:
                        yield response
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await self._abort(error, method, context)

        return stream

    async def _abort(self, error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if isinstance(error, grpc.RpcError):
            error = from_rpc_error(error)
        if not isinstance(error, PagewireError):
            logger.error("%s failed", method, exc_info=error)
            error = errors.InternalError(f"internal error in {self._service}; its log has the details")
        await context.abort_with_status(to_status(error))
