"""Lets only calls with a good API key through to a service: metadata `authorization: Bearer KEY`.

Health and reflection stay open: probes have no key, and the contract is no secret.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from frontend_svc.api_keys import ApiKeys
from pagewire.errors import UnauthenticatedError

Metadata = Iterable[tuple[str, str | bytes]] | None


def key_name(keys: ApiKeys | None, metadata: Metadata) -> str:
    """The name of a call's key; empty where no keys are asked for.

    Raises UnauthenticatedError for a missing or unknown one, without saying it.
    """
    if keys is None:
        return ""
    given = next((value for key, value in metadata or () if key == "authorization"), None)
    if given is None:
        raise UnauthenticatedError("metadata `authorization: Bearer KEY` is missing", reason="API_KEY_MISSING")
    scheme, _, key = (given if isinstance(given, str) else "").partition(" ")
    name = keys.name_of(key.strip()) if scheme.lower() == "bearer" else None
    if name is None:
        raise UnauthenticatedError("the API key in metadata `authorization` is not known", reason="API_KEY_INVALID")
    return name


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Stands before one service. A refused call's message is not even read."""

    def __init__(self, service_name: str, keys: ApiKeys) -> None:
        self._prefix = f"/{service_name}/"
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        # A method that does not exist stays that: whoever stands before us must not take its name for one of ours.
        if handler is not None and handler_call_details.method.startswith(self._prefix):
            try:
                key_name(self._keys, handler_call_details.invocation_metadata)
            except UnauthenticatedError as error:
                refusal = error

                async def refuse(requests: Any, context: Any) -> None:
                    raise refusal

                return grpc.stream_unary_rpc_method_handler(refuse)
        return handler
