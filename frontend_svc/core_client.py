"""The frontend's gRPC client of one core.

One channel and one output stream per core. A broken stream is opened again for as long as the core keeps our requests
(its lease, and at most `RECONNECT_S`), asking for what is missing; a core with another incarnation, or one that is
silent for three heartbeats, is lost, and everything that it had with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy as np

from frontend_svc import core_wire
from frontend_svc.metrics import CoreLinks
from pagewire.columns import EMPTY_INT32
from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    StepOutputs,
)
from pagewire.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PagewireError,
    UnavailableError,
)
from pagewire.runtime.rpc_metrics import RpcClientMetrics
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import MAX_MESSAGE_BYTES, TlsConfig, secure_or_insecure_channel
from pagewire.types_wire import TokenizerAssembler, tokenizer_sha256
from pagewire.v1 import core_pb2, core_pb2_grpc

log = logging.getLogger(__name__)
T = TypeVar("T")
Stream = grpc.aio.StreamStreamCall[core_pb2.StreamOutputsRequest, core_pb2.StreamOutputsResponse]

CALL_TIMEOUT_S = 4.0
UTILITY_TIMEOUT_S = 300.0
TOKENIZER_TIMEOUT_S = 60.0
RECONNECT_S = 3.0
RETRY_DELAY_S = (0.05, 1.0)
MAX_HANDSHAKE_DELAY_S = 0.2
"""A core that is not ready is asked this often: what it takes longer than needed, a user waits at the start."""
NUM_SILENT_HEARTBEATS = 3
RETRY_AFTER_S = 1.0
ACKNOWLEDGE_EVERY = 32
"""Messages that one acknowledgement covers, unless a request ends in one: an acknowledgement costs about as much as a
message, and a core that keeps 32 of them does not notice."""


async def _answer(call: Awaitable[T]) -> T:
    """Awaits a call and turns its failure into a PagewireError."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


class GrpcCoreClient:
    """An EngineCoreClient over gRPC. Made by `connect`."""

    def __init__(
        self,
        target: str,
        frontend_incarnation: str,
        channel: grpc.aio.Channel,
        links: CoreLinks | None = None,
        metrics: RpcClientMetrics | None = None,
    ) -> None:
        self.target = target
        self._links = links
        self.frontend_incarnation = frontend_incarnation
        self._channel = channel
        self._stub = core_pb2_grpc.EngineCoreServiceStub(channel if metrics is None else metrics.aio(channel))
        self._info: EngineInfo | None = None
        self._tokenizer_files: dict[str, bytes] = {}
        self._stream: Stream | None = None
        self._is_open = asyncio.Event()
        self._lost: PagewireError | None = None
        self._num_received: dict[int, int] = {}
        self._unacknowledged: list[StepOutputs] = []
        """Processed, and not yet counted in _num_received."""
        self._waiting_since: float | None = None
        """When the read that runs began; None while nobody reads."""
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        target: str,
        frontend_incarnation: str,
        tls: TlsConfig | None = None,
        timeout_s: float | None = None,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        server_name: str = "",
        links: CoreLinks | None = None,
        metrics: RpcClientMetrics | None = None,
    ) -> GrpcCoreClient:
        """Shakes hands, fetches the tokenizer and opens the output stream; waits for a core that is not there yet.

        `links` is told of the connection's life, `metrics` measures its calls.

        Raises:
            UnavailableError: the core was not ready within `timeout_s` (None waits for ever).
            FailedPreconditionError: the core speaks another protocol.
        """
        channel = secure_or_insecure_channel(
            target, tls, max_message_bytes=max_message_bytes, server_name=server_name if tls is not None else ""
        )
        client = cls(target, frontend_incarnation, channel, links, metrics)
        try:
            await client._shake_hands(timeout_s)
            await client._fetch_tokenizer()
            client._stream = await client._open()
        except BaseException:
            await channel.close()
            raise
        client._is_open.set()
        if links is not None:
            links.opened(client, target, client.info)
        client._watchdog = asyncio.get_running_loop().create_task(client._watch())
        return client

    async def _shake_hands(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        delay = RETRY_DELAY_S[0]
        request = core_wire.handshake_request(self.frontend_incarnation)
        while True:
            try:
                response = await _answer(self._stub.Handshake(request, timeout=CALL_TIMEOUT_S))
                self._info = core_wire.engine_info_from_proto(response)
                return
            except FailedPreconditionError:
                raise
            except PagewireError as error:
                if deadline is not None and time.monotonic() + delay >= deadline:
                    raise UnavailableError(
                        f"the core at {self.target} was not ready within {timeout_s:g} s: {error}",
                        retry_after_s=RETRY_AFTER_S,
                    ) from error
                log.debug("core at %s: %s", self.target, error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_HANDSHAKE_DELAY_S)

    async def _fetch_tokenizer(self) -> None:
        assembler = TokenizerAssembler()
        try:
            async for response in self._stub.GetTokenizer(core_pb2.GetTokenizerRequest(), timeout=TOKENIZER_TIMEOUT_S):
                assembler.add(response.chunk)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        self._tokenizer_files = assembler.files()
        announced, found = self.info.model.tokenizer_sha256, tokenizer_sha256(self._tokenizer_files)
        if announced and announced != found:
            raise InternalError(f"the tokenizer's sha256 is {found}, the core announced {announced}")

    async def _open(self) -> Stream:
        """Opens the output stream, naming what we have. Raises UnavailableError where the core is another one now."""
        call: Stream = self._stub.StreamOutputs()
        try:
            self._count_received()
            await call.write(core_wire.open_stream(self.frontend_incarnation, self._num_received))
            first = await asyncio.wait_for(call.read(), CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError as error:
            call.cancel()
            raise UnavailableError(f"the core at {self.target} does not open the output stream") from error
        if not isinstance(first, core_pb2.StreamOutputsResponse) or first.WhichOneof("message") != "opened":
            call.cancel()
            raise InternalError("the core did not answer Open")
        if first.opened.core_incarnation != self.info.core_incarnation:
            call.cancel()
            raise FailedPreconditionError("another core runs there now", reason="NEW_CORE_INCARNATION")
        self._unknown = core_wire.unknown_request_ids(first.opened)
        return call

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._tokenizer_files

    async def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hands over requests, all or none. Tried again once over a broken connection: a repeated Add is idempotent."""
        message = core_wire.add_request(self.frontend_incarnation, requests)
        for request in requests:
            self._num_received[request.request_id] = 0
        try:
            try:
                await self._call(self._stub.Add, message)
            except UnavailableError as error:
                if error.reason == "CORE_LOST" or error.retry_after_s is not None:
                    raise  # refused by the core itself, or nobody is there
                await self._call(self._stub.Add, message)
        except BaseException:
            for request in requests:
                self._num_received.pop(request.request_id, None)
            raise

    async def abort(self, request_ids: Sequence[int], reason: AbortReason) -> list[AbortOutcome]:
        for request_id in request_ids:
            self._num_received.pop(request_id, None)
        message = core_wire.abort_request(self.frontend_incarnation, request_ids, reason)
        return core_wire.abort_outcomes(await self._call(self._stub.Abort, message))

    async def utility(self, command: Command) -> CommandResult:
        message = core_wire.command_to_proto(command)
        return core_wire.command_result(await self._call(self._stub.Utility, message, UTILITY_TIMEOUT_S))

    async def _call(self, method: Any, message: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        if not self._is_open.is_set() and self._lost is None:
            try:
                await asyncio.wait_for(self._is_open.wait(), RECONNECT_S)
            except TimeoutError as error:
                raise UnavailableError("the connection to the core is broken", reason="CORE_LOST") from error
        if self._lost is not None:
            raise self._lost
        try:
            return await _answer(method(message, timeout=timeout_s))
        except (DeadlineExceededError, AbortedError) as error:
            # The deadline is ours and not the caller's, and only a closed channel cancels the call.
            text = f"the core at {self.target} did not answer within {timeout_s:g} s: {error}"
            raise self._lost or UnavailableError(text, retry_after_s=RETRY_AFTER_S) from error
        except asyncio.CancelledError:
            # A channel that is closed under a call cancels it like its caller would, and the caller is still waiting.
            task = asyncio.current_task()
            if self._lost is None or (task is not None and task.cancelling()):
                raise
            raise self._lost from None

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """Everything in order. Raises UnavailableError once the core is lost."""
        while True:
            try:
                assert self._stream is not None
                async for outputs in self._read(self._stream):
                    yield outputs
            except PagewireError as error:
                await self._reopen(error)
                if self._unknown:
                    yield _lost_outputs(self._unknown)

    async def _read(self, stream: Stream) -> AsyncIterator[StepOutputs]:
        try:
            while True:
                self._waiting_since = time.monotonic()
                message = await stream.read()
                self._waiting_since = None
                if not isinstance(message, core_pb2.StreamOutputsResponse):
                    raise UnavailableError(f"the core at {self.target} ended the output stream")
                if message.WhichOneof("message") != "outputs":
                    continue
                outputs = core_wire.step_outputs_from_proto(message.outputs)
                yield outputs
                self._unacknowledged.append(outputs)
                if outputs.finished or len(self._unacknowledged) >= ACKNOWLEDGE_EVERY:
                    await stream.write(core_wire.acknowledge(outputs.sequence, self._count_received()))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # a write after the stream ended
            raise UnavailableError(f"the core at {self.target} ended the output stream") from error
        except asyncio.CancelledError:
            # Ours, or that of the watchdog, which cancels the call and not this task.
            if self._lost is not None:
                raise self._lost from None
            raise

    def _count_received(self) -> list[int]:
        """Counts what was received and processed since the last time; returns the requests that ended."""
        received, ends, ended = self._num_received, dict[int, int](), list[int]()
        for outputs in self._unacknowledged:
            ends.update(zip(outputs.request_ids.tolist(), (outputs.offsets + outputs.num_tokens).tolist(), strict=True))
            ended += [int(outputs.request_ids[finished.row]) for finished in outputs.finished]
        self._unacknowledged.clear()
        for request_id in ended:
            received.pop(request_id, None)
        for request_id in received.keys() & ends.keys():
            received[request_id] = max(received[request_id], ends[request_id])
        return ended

    async def _reopen(self, error: PagewireError) -> None:
        """Opens the stream again, or raises what makes that impossible."""
        self._is_open.clear()
        self._waiting_since = None
        deadline = time.monotonic() + min(RECONNECT_S, self.info.lease_ms / 1000)
        delay = RETRY_DELAY_S[0]
        log.warning("the stream from the core at %s broke: %s", self.target, error)
        while self._lost is None:
            try:
                self._stream = await asyncio.wait_for(self._open(), max(0.1, deadline - time.monotonic()))
            except FailedPreconditionError as refused:
                self._lose(UnavailableError(refused.message, retry_after_s=RETRY_AFTER_S, reason="CORE_LOST"))
            except (PagewireError, TimeoutError) as again:
                if time.monotonic() + delay >= deadline:
                    why = f"{error}; not back in time: {again}"
                    self._lose(UnavailableError(why, retry_after_s=RETRY_AFTER_S, reason="CORE_LOST"))
                    break
                await asyncio.sleep(delay)
                delay = min(delay * 2, RETRY_DELAY_S[1])
            else:
                if self._links is not None:
                    self._links.reopened(self)
                self._is_open.set()
                return
        assert self._lost is not None
        raise self._lost

    def _lose(self, error: PagewireError, *, is_closed: bool = False) -> None:
        if self._lost is None:
            self._lost = error
            if self._links is not None:
                self._links.lost(self, is_closed=is_closed)
        self._is_open.set()

    async def _watch(self) -> None:
        """Declares a silent core dead: one from which a read has waited for three heartbeats.

        A check that itself came late counts for nothing: our own loop was busy, and messages may lie there unread.
        """
        interval_s = max(0.05, self.info.heartbeat_interval_ms / 1000)
        limit_s = NUM_SILENT_HEARTBEATS * interval_s
        tick_s = interval_s / 4
        while self._lost is None:
            planned = time.monotonic() + tick_s
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if now - planned > tick_s or self._waiting_since is None:
                continue
            if self._is_open.is_set() and now - self._waiting_since > limit_s:
                text = f"the core at {self.target} was silent for {now - self._waiting_since:.1f} s"
                self._lose(UnavailableError(text, retry_after_s=RETRY_AFTER_S, reason="CORE_LOST"))
                if self._stream is not None:
                    self._stream.cancel()

    async def close(self) -> None:
        """Closes the channel; the core aborts what is alive when the lease ends, or at once where it can be told."""
        self._lose(UnavailableError("the client is closed", reason="CORE_LOST"), is_closed=True)
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._stream is not None:
            self._stream.cancel()
        await self._channel.close()


def _lost_outputs(request_ids: Sequence[int]) -> StepOutputs:
    """Requests that the core has forgotten, as outputs that end them."""
    num_rows = len(request_ids)
    message = "the core lost the request while the connection was broken"
    return StepOutputs(
        step=0,
        request_ids=np.asarray(request_ids, np.uint64),
        offsets=np.zeros(num_rows, np.int32),
        num_tokens=np.zeros(num_rows, np.int32),
        token_ids=EMPTY_INT32,
        finished=[
            Finished(row, FinishReason.ERROR, error_code="UNAVAILABLE", error_message=message)
            for row in range(num_rows)
        ],
    )
