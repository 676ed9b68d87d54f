"""The text service: what FrontendService offers, in plain Python, over any EngineCoreClient.

A request ends once: with its last output (finish reasons STOP, LENGTH, or ABORT where somebody called `abort`), or
with a PagewireError. Cancelling `respond` is the caller's cancellation and frees everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.input_processor import Conversation, InputProcessor, TextRequest
from frontend_svc.observer import Observers, RequestObserver, RequestTimeline
from frontend_svc.outbox import Outbox, ResponseWriter, Write
from frontend_svc.output_processor import DEFAULT_MAX_TOKENS_BEHIND
from frontend_svc.outputs import RequestOutput
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.session import RETRY_AFTER_S, CoreSession, Ticket
from frontend_svc.stats import RequestCounters
from pagewire.engine import AbortOutcome, AbortReason, ModelInfo
from pagewire.errors import (
    InvalidArgumentError,
    PagewireError,
    UnavailableError,
    UnimplementedError,
    violation,
)
from pagewire.stats import CoreConnection, FrontendStats

log = logging.getLogger(__name__)
T = TypeVar("T")

NUM_TOKENIZER_THREADS = 2
MAX_ABORT_IDS = 4096
MAX_DETOKENIZE_IDS = 2**20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as callers see it."""

    info: ModelInfo
    has_chat_template: bool
    kv_cache_tokens: int


class TextService:
    """Serves one core at a time. All methods belong to the event loop that runs `run`.

    Args:
        connect: makes a connected client; called again whenever a core is lost. It waits and retries by itself.
        max_tokens_behind: how far a caller may fall behind before it is cut off.
        on_ready: told whenever requests can (or can no longer) be served.
        observers: watch requests.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[EngineCoreClient]],
        *,
        max_tokens_behind: int = DEFAULT_MAX_TOKENS_BEHIND,
        on_ready: Callable[[bool], Awaitable[None]] | None = None,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self._counters = RequestCounters()
        self._observers = Observers((self._counters, *observers))
        self._connect = connect
        self._max_tokens_behind = max_tokens_behind
        self._on_ready = on_ready
        self._session: CoreSession | None = None
        self._why_unavailable = "no core is connected yet"
        self._is_draining = False
        self._has_session = asyncio.Event()
        self._pool = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")

    # -- life of the connection ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects, serves until the core is lost, and connects again, until cancelled."""
        while True:
            try:
                client = await self._connect()
                session = await self.off_loop(CoreSession, client, self._max_tokens_behind, Outbox())
            except PagewireError as error:
                self._why_unavailable = error.message
                log.warning("cannot use the core: %s", error)
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            await self._serve(session)

    async def _serve(self, session: CoreSession) -> None:
        log.info("core %s serves %s", session.client.info.core_incarnation, session.client.info.model.model)
        self._session = session
        self._has_session.set()
        error: PagewireError = UnavailableError("the frontend is shutting down")
        try:
            await self._tell_ready(True)
            await session.pump()
        except PagewireError as lost:
            log.error("the core is lost with %d requests: %s", session.num_requests, lost)
            error = UnavailableError(f"the core was lost: {lost}", retry_after_s=RETRY_AFTER_S, reason="CORE_LOST")
        finally:
            self._session = None
            self._has_session.clear()
            self._why_unavailable = error.message
            session.fail_all(error)
            await self._tell_ready(False)
            await session.close()

    async def _tell_ready(self, is_ready: bool) -> None:
        if self._on_ready is not None:
            await self._on_ready(is_ready and not self._is_draining)

    async def wait_ready(self) -> None:
        """Waits until a core is connected."""
        await self._has_session.wait()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, lets living ones end for `grace_s` seconds, then ends them with UnavailableError."""
        self._is_draining = True
        session = self._session
        if session is None or session.num_requests == 0:
            return
        try:
            await asyncio.wait_for(session.wait_idle(), grace_s)
        except TimeoutError:
            log.warning("%d requests did not end within %g s", session.num_requests, grace_s)
            session.fail_all(
                UnavailableError("the frontend is shutting down", retry_after_s=RETRY_AFTER_S, reason="SHUTDOWN"),
                AbortReason.SHUTDOWN,
            )

    def close(self) -> None:
        """Lets go of the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def session(self) -> CoreSession:
        """The connection in use. Raises UnavailableError while there is none."""
        if self._session is None:
            raise UnavailableError(self._why_unavailable, retry_after_s=RETRY_AFTER_S)
        return self._session

    def stats(self, core_target: str = "") -> FrontendStats:
        """Counts, and the core; `core_target` is where it is looked for."""
        session = self._session
        if session is None:
            core = CoreConnection(core_target, error=self._why_unavailable)
        else:
            info = session.client.info
            core = CoreConnection(core_target, True, info.core_incarnation, info.model.model, session.num_requests)
        return replace(self._counters.stats(), cores=(core,), is_draining=self._is_draining)

    # -- requests -------------------------------------------------------------------------------------------------

    async def respond(self, request: TextRequest, write: Write) -> None:
        """Completes a prompt or answers a conversation; returns once `write` has sent the last output.

        Sends outputs by the request's output_kind; the last has `finished` and `usage` set.

        Raises:
            InvalidArgumentError, NotFoundError, AlreadyExistsError, ResourceExhaustedError, UnavailableError,
            DeadlineExceededError, InternalError, and what `write` raises.
        """
        model = self._session.client.info.model.model if self._session is not None else ""
        if not request.request_id:
            request = replace(request, request_id=f"req-{secrets.token_hex(12)}")
        timeline = RequestTimeline(request, model)
        self._observers.began(timeline)
        try:
            await self._respond(timeline, write)
        except BaseException as error:
            timeline.error = error
            raise
        finally:
            self._observers.ended(timeline)

    async def _respond(self, timeline: RequestTimeline, write: Write) -> None:
        if self._is_draining:
            raise UnavailableError("the frontend is shutting down", retry_after_s=RETRY_AFTER_S, reason="SHUTDOWN")
        request, started = timeline.request, timeline.received_ns / 1e9
        session = self.session
        session.inputs.check(request)
        ticket = session.reserve(request.request_id, request.sampling_params.n)

        def send(output: RequestOutput) -> Coroutine[Any, Any, None]:
            if output.finished:
                # Before it is sent: who has the last output may use the id again.
                session.release(ticket)
            return write(output)

        try:
            parent = await self._hand_over(session, ticket, timeline, started)
            await ResponseWriter(parent, send, session.outbox).run()
        finally:
            session.release(ticket)
            is_late = request.remaining_s is not None and time.monotonic() - started >= request.remaining_s
            session.abort(ticket, AbortReason.DEADLINE if is_late else AbortReason.CLIENT)
            timeline.abort_reason = ticket.abort_reason

    async def _hand_over(
        self, session: CoreSession, ticket: Ticket, timeline: RequestTimeline, started: float
    ) -> ParentRequest:
        request = timeline.request
        timeline.tokenize_ns = time.monotonic_ns()
        parent, engine_requests = await self.off_loop(session.inputs.process, request)
        timeline.parent, timeline.tokenized_ns = parent, time.monotonic_ns()
        if self._session is not session:
            raise UnavailableError(self._why_unavailable, retry_after_s=RETRY_AFTER_S)
        if request.remaining_s is not None:
            remaining_s = request.remaining_s - (time.monotonic() - started)
            for engine_request in engine_requests:
                engine_request.remaining_ms = max(0, int(remaining_s * 1000))
        await session.hand_over(ticket, parent, engine_requests)
        timeline.added_ns = time.monotonic_ns()
        return parent

    def abort(self, request_ids: Sequence[str]) -> list[AbortOutcome]:
        """Ends requests by external id, matched exactly. Their streams end with finish reason ABORT. Idempotent."""
        if len(request_ids) > MAX_ABORT_IDS:
            limit = f"at most {MAX_ABORT_IDS} ids in one call"
            raise InvalidArgumentError([violation("request_ids", f"{len(request_ids)} ids", limit)])
        session = self.session
        return [session.abort_by_external_id(request_id) for request_id in request_ids]

    # -- text -----------------------------------------------------------------------------------------------------

    async def tokenize(
        self,
        prompt: str | Conversation,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        returns_token_strings: bool = False,
    ) -> tuple[list[int], list[str], int]:
        """Token ids of a text or conversation, their texts where asked for, and the model's max_model_len."""
        inputs = self._inputs(model)
        ids = await self.off_loop(inputs.encode_any, prompt, add_special_tokens)
        texts = await self.off_loop(inputs.token_texts, ids) if returns_token_strings else []
        return ids, texts, inputs.max_model_len

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        inputs = self._inputs(model)
        if len(token_ids) > MAX_DETOKENIZE_IDS:
            limit = f"at most {MAX_DETOKENIZE_IDS} ids in one call"
            raise InvalidArgumentError([violation("token_ids", f"{len(token_ids)} ids", limit)])
        return await self.off_loop(inputs.decode, token_ids, skip_special_tokens)

    def embed(self, model: str = "") -> None:
        """Vectors are for pooling models, and no core serves one yet. Always raises."""
        inputs = self._inputs(model)
        raise UnimplementedError(
            f"model {inputs.info.model.model!r} generates text and gives no embeddings; Embed needs a pooling model"
        )

    def served_model(self, model: str = "") -> ServedModel:
        """The model of this name; empty means the one that is served."""
        inputs = self._inputs(model)
        info = inputs.info
        return ServedModel(info.model, inputs.chat_template.is_present, info.num_kv_blocks * info.block_size)

    def _inputs(self, model: str) -> InputProcessor:
        inputs = self.session.inputs
        inputs.check_model(model)
        return inputs

    async def off_loop(self, function: Callable[..., T], *args: object) -> T:
        """Runs what may take long on a thread, so that the event loop answers everybody else meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args))
