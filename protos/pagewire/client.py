"""The public Python client of a frontend, blocking and asyncio.

    with Client("127.0.0.1:50051") as client:
        for part in client.generate("The capital of France is", max_tokens=16, temperature=0):
            print(part.text, end="", flush=True)
        print(client.complete_chat("Why is the sky blue?", max_tokens=64).text)

Sampling parameters are keywords (those of `pagewire.sampling.SamplingParams`) or one `params` object. Every failure is
a `pagewire.errors.PagewireError` with the request attached as `error.request`. Leaving a stream early cancels it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from pagewire.client_types import (
    Messages,
    Model,
    Output,
    Prompt,
    RequestOptions,
    Response,
    Usage,
    chat_messages,
    chat_request,
    generate_request,
    join_responses,
    make_sampling_params,
    read_model,
    read_response,
)
from pagewire.engine import AbortOutcome
from pagewire.errors import DeadlineExceededError, PagewireError, UnavailableError
from pagewire.runtime.propagation import Metadata, trace_metadata
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import TlsConfig, secure_or_insecure_channel, sync_channel
from pagewire.sampling import SamplingParams
from pagewire.v1 import frontend_pb2, frontend_pb2_grpc

__all__ = ["AsyncClient", "Client", "Output", "Response", "SamplingParams", "Usage"]


def _error(error: grpc.RpcError, target: str, request: object) -> PagewireError:
    found = from_rpc_error(error)
    if isinstance(found, UnavailableError) and "failed to connect" in found.message.lower():
        found.message = f"no frontend answers at {target}: {found.message}"
        found.args = (found.message,)
    if isinstance(found, DeadlineExceededError):
        found.message = f"the frontend at {target} did not finish before the deadline"
        found.args = (found.message,)
    found.request = request
    return found


def _tokenize_request(text: str | None, messages: Messages | None, add_special_tokens: bool | None) -> Any:
    request = frontend_pb2.TokenizeRequest()
    if messages is not None:
        request.conversation.messages.extend(chat_messages(messages))
    else:
        request.text = text or ""
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    return request


def _abort_outcomes(response: frontend_pb2.AbortResponse) -> dict[str, AbortOutcome]:
    return {result.request_id: AbortOutcome(result.outcome) for result in response.results}


class Client:
    """A blocking client of one frontend (host:port). Safe to use from several threads."""

    def __init__(
        self, target: str, *, tls: TlsConfig | None = None, timeout_s: float | None = None, api_key: str = ""
    ) -> None:
        """`timeout_s` is the deadline of every call unless the call brings its own; `api_key` goes with each."""
        self.target = target
        self._timeout_s = timeout_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._channel = sync_channel(target, tls)
        self._stub: Any = frontend_pb2_grpc.FrontendServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        self._channel.close()

    def _options(self, timeout_s: float | None, metadata: Metadata | None = None) -> dict[str, Any]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return {"timeout": timeout_s, "metadata": (*(self._metadata or ()), *(metadata or ())) or None}

    def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        try:
            return getattr(self._stub, method)(request, **self._options(timeout_s))
        except grpc.RpcError as error:
            raise _error(error, self.target, request) from None

    def _stream(
        self, method: str, request: Any, timeout_s: float | None, metadata: Metadata | None
    ) -> Iterator[Response]:
        call = getattr(self._stub, method)(request, **self._options(timeout_s, metadata))
        try:
            for message in call:
                yield read_response(message)
        except grpc.RpcError as error:
            raise _error(error, self.target, request) from None
        finally:
            call.cancel()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Iterator[Response]:
        """Completes a prompt (text or token ids) and yields what is new as it comes."""
        options = options or RequestOptions()
        request = generate_request(prompt, make_sampling_params(params, sampling), options)
        return self._stream("Generate", request, timeout_s, trace_metadata(options.trace_context))

    def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Response:
        """Completes a prompt and returns the whole answer."""
        return join_responses(self.generate(prompt, params, options=options, timeout_s=timeout_s, **sampling))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Iterator[Response]:
        """Answers a conversation, rendered with the model's chat template, and yields what is new as it comes."""
        options = options or RequestOptions()
        request = chat_request(messages, make_sampling_params(params, sampling), options)
        return self._stream("Chat", request, timeout_s, trace_metadata(options.trace_context))

    def complete_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Response:
        """Answers a conversation and returns the whole answer."""
        return join_responses(self.chat(messages, params, options=options, timeout_s=timeout_s, **sampling))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text or of a rendered conversation."""
        request = _tokenize_request(text, messages, add_special_tokens)
        return list(self._call("Tokenize", request, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """Text of token ids."""
        request = frontend_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call("Detokenize", request, timeout_s).text)

    def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, AbortOutcome]:
        """Ends running requests by their ids; what became of each."""
        return _abort_outcomes(self._call("Abort", frontend_pb2.AbortRequest(request_ids=request_ids), timeout_s))

    def get_model(self, name: str = "", *, timeout_s: float | None = None) -> Model:
        """What is served; NotFoundError for another name."""
        return read_model(self._call("GetModel", frontend_pb2.GetModelRequest(model=name), timeout_s).model)

    def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        """All that are served."""
        response = self._call("ListModels", frontend_pb2.ListModelsRequest(), timeout_s)
        return [read_model(model) for model in response.models]


class AsyncClient:
    """An asyncio client of one frontend (host:port); same calls as Client. Made inside a running event loop."""

    def __init__(
        self, target: str, *, tls: TlsConfig | None = None, timeout_s: float | None = None, api_key: str = ""
    ) -> None:
        """`timeout_s` is the deadline of every call unless the call brings its own; `api_key` goes with each."""
        self.target = target
        self._timeout_s = timeout_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._channel = secure_or_insecure_channel(target, tls)
        self._stub: Any = frontend_pb2_grpc.FrontendServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        await self._channel.close()

    def _options(self, timeout_s: float | None, metadata: Metadata | None = None) -> dict[str, Any]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return {"timeout": timeout_s, "metadata": (*(self._metadata or ()), *(metadata or ())) or None}

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        try:
            return await getattr(self._stub, method)(request, **self._options(timeout_s))
        except grpc.RpcError as error:
            raise _error(error, self.target, request) from None

    async def _stream(
        self, method: str, request: Any, timeout_s: float | None, metadata: Metadata | None
    ) -> AsyncIterator[Response]:
        call = getattr(self._stub, method)(request, **self._options(timeout_s, metadata))
        try:
            async for message in call:
                yield read_response(message)
        except grpc.RpcError as error:
            raise _error(error, self.target, request) from None
        finally:
            call.cancel()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Response]:
        """Completes a prompt (text or token ids) and yields what is new as it comes."""
        options = options or RequestOptions()
        request = generate_request(prompt, make_sampling_params(params, sampling), options)
        return self._stream("Generate", request, timeout_s, trace_metadata(options.trace_context))

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Response:
        """Completes a prompt and returns the whole answer."""
        stream = self.generate(prompt, params, options=options, timeout_s=timeout_s, **sampling)
        return join_responses([part async for part in stream])

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Response]:
        """Answers a conversation, rendered with the model's chat template, and yields what is new as it comes."""
        options = options or RequestOptions()
        request = chat_request(messages, make_sampling_params(params, sampling), options)
        return self._stream("Chat", request, timeout_s, trace_metadata(options.trace_context))

    async def complete_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Response:
        """Answers a conversation and returns the whole answer."""
        stream = self.chat(messages, params, options=options, timeout_s=timeout_s, **sampling)
        return join_responses([part async for part in stream])

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text or of a rendered conversation."""
        request = _tokenize_request(text, messages, add_special_tokens)
        return list((await self._call("Tokenize", request, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """Text of token ids."""
        request = frontend_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call("Detokenize", request, timeout_s)).text)

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, AbortOutcome]:
        """Ends running requests by their ids; what became of each."""
        return _abort_outcomes(await self._call("Abort", frontend_pb2.AbortRequest(request_ids=request_ids), timeout_s))

    async def get_model(self, name: str = "", *, timeout_s: float | None = None) -> Model:
        """What is served; NotFoundError for another name."""
        return read_model((await self._call("GetModel", frontend_pb2.GetModelRequest(model=name), timeout_s)).model)

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        """All that are served."""
        response = await self._call("ListModels", frontend_pb2.ListModelsRequest(), timeout_s)
        return [read_model(model) for model in response.models]
