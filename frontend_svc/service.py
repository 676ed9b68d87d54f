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

from frontend_svc.balance import prefix_key
from frontend_svc.core_pool import Connect, CorePool
from frontend_svc.input_processor import Conversation, InputProcessor, TextRequest
from frontend_svc.observer import Observers, RequestObserver, RequestTimeline
from frontend_svc.outbox import ResponseWriter, Write
from frontend_svc.output_processor import DEFAULT_MAX_TOKENS_BEHIND
from frontend_svc.outputs import RequestOutput
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.session import CoreSession
from frontend_svc.stats import RequestCounters
from frontend_svc.tickets import RETRY_AFTER_S, Ticket, Tickets
from pagewire.engine import AbortOutcome, AbortReason, EngineRequest, ModelInfo
from pagewire.errors import (
    InvalidArgumentError,
    PagewireError,
    UnavailableError,
    UnimplementedError,
    violation,
)
from pagewire.stats import FrontendStats

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
    """Serves the cores of one model. All methods belong to the event loop that runs `run`.

    Args:
        connect: makes a connected client of the one core; called again whenever it is lost. It waits and retries by
            itself. Left out where `cores.keep` says which cores there are.
        max_tokens_behind: how far a caller may fall behind before it is cut off.
        on_ready: told whether requests can be served, whenever a core comes or goes.
        observers: watch requests.
    """

    def __init__(
        self,
        connect: Connect | None = None,
        *,
        max_tokens_behind: int = DEFAULT_MAX_TOKENS_BEHIND,
        on_ready: Callable[[bool], Awaitable[None]] | None = None,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self._counters = RequestCounters()
        self._observers = Observers((self._counters, *observers))
        self._on_ready = on_ready
        self._is_draining = False
        self._tickets = Tickets()
        self._pool = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self.cores = CorePool(max_tokens_behind, self.off_loop, self._tell_ready)
        if connect is not None:
            self.cores.keep({"core": connect})

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the cores connected until cancelled."""
        await self.cores.run()

    async def _tell_ready(self, is_ready: bool) -> None:
        if self._on_ready is not None:
            await self._on_ready(is_ready and not self._is_draining)

    async def wait_ready(self) -> None:
        """Waits until a core is connected."""
        await self.cores.wait_ready()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, lets living ones end for `grace_s` seconds, then ends them with UnavailableError."""
        self._is_draining = True
        try:
            if len(self._tickets):
                await asyncio.wait_for(self._tickets.wait_idle(), grace_s)
        except TimeoutError:
            log.warning("%d requests did not end within %g s", len(self._tickets), grace_s)
            for session in self.cores.sessions:
                session.fail_all(_shutting_down(), AbortReason.SHUTDOWN)

    def close(self) -> None:
        """Lets go of the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def session(self) -> CoreSession:
        """The connection to the first of the cores. Raises UnavailableError while there is none."""
        sessions = self.cores.sessions
        if not sessions:
            raise self.cores.unavailable()
        return sessions[0]

    @property
    def num_requests(self) -> int:
        """Callers' requests that live."""
        return len(self._tickets)

    def stats(self) -> FrontendStats:
        """Counts, and the cores."""
        return replace(self._counters.stats(), cores=self.cores.connections(), is_draining=self._is_draining)

    # -- requests -------------------------------------------------------------------------------------------------

    async def respond(self, request: TextRequest, write: Write) -> None:
        """Completes a prompt or answers a conversation; returns once `write` has sent the last output.

        Sends outputs by the request's output_kind; the last has `finished` and `usage` set.

        Raises:
            InvalidArgumentError, NotFoundError, AlreadyExistsError, ResourceExhaustedError, UnavailableError,
            DeadlineExceededError, InternalError, and what `write` raises.
        """
        sessions = self.cores.sessions
        model = sessions[0].client.info.model.model if sessions else ""
        if not request.request_id:
            request = replace(request, request_id=f"req-{secrets.token_hex(12)}")
        timeline = RequestTimeline(request, model, request.api_key)
        self._observers.began(timeline)
        try:
            await self._respond(timeline, write)
        except BaseException as error:
            timeline.error = error
            raise
        finally:
            self._observers.ended(timeline)

    def refuse(self, request: TextRequest, error: PagewireError) -> None:
        """Tells the observers of a request whose message could not be read; `request` has what is known of it."""
        timeline = RequestTimeline(request, "", request.api_key, error=error)
        self._observers.began(timeline)
        self._observers.ended(timeline)

    async def _respond(self, timeline: RequestTimeline, write: Write) -> None:
        if self._is_draining:
            raise _shutting_down()
        request, started = timeline.request, timeline.received_ns / 1e9
        inputs = self.cores.inputs
        inputs.check(request)
        limit = self.cores.max_num_requests
        ticket = self._tickets.reserve(request.request_id, request.sampling_params.n, request.api_key, limit)

        def send(output: RequestOutput) -> Coroutine[Any, Any, None]:
            timeline.keep_text(output)
            if output.finished:
                # Before it is sent: who has the last output may use the id again.
                self._release(ticket)
            return write(output)

        try:
            timeline.tokenize_ns = time.monotonic_ns()
            parent, engine_requests = await self.off_loop(inputs.process, request)
            timeline.parent, timeline.tokenized_ns = parent, time.monotonic_ns()
            if request.remaining_s is not None:
                remaining_s = request.remaining_s - (time.monotonic() - started)
                for engine_request in engine_requests:
                    engine_request.remaining_ms = max(0, int(remaining_s * 1000))
            session = await self._hand_over(inputs, ticket, parent, engine_requests)
            timeline.core = session.name
            if parent.error is None:
                timeline.added_ns = time.monotonic_ns()
            await ResponseWriter(parent, send, session.outbox).run()
        finally:
            self._release(ticket)
            is_late = request.remaining_s is not None and time.monotonic() - started >= request.remaining_s
            self._abort(ticket, AbortReason.DEADLINE if is_late else AbortReason.CLIENT)
            timeline.abort_reason = ticket.abort_reason

    async def _hand_over(
        self, inputs: InputProcessor, ticket: Ticket, parent: ParentRequest, requests: list[EngineRequest]
    ) -> CoreSession:
        """Gives a request to a core, or to a second one where the first does not take it; returns which."""
        first = requests[0]
        key = prefix_key(first.prompt_token_ids, first.cache_salt)
        session = self.cores.choose(inputs, key, ticket.n)
        error = await session.hand_over(ticket, parent, requests)
        if error is not None:
            try:
                other = self.cores.choose(inputs, key, ticket.n, session)
            except PagewireError:
                session.fail(parent, error)
                return session
            log.info("core %s did not take request %s: %s", session.name, ticket.external_request_id, error)
            session = other
            if (error := await session.hand_over(ticket, parent, requests)) is not None:
                session.fail(parent, error)
        return session

    def _release(self, ticket: Ticket) -> None:
        self._tickets.release(ticket)
        if ticket.session is not None:
            ticket.session.release(ticket)

    def _abort(self, ticket: Ticket, reason: AbortReason) -> None:
        if ticket.session is not None:
            ticket.session.abort(ticket, reason)
        else:
            ticket.is_aborted, ticket.abort_reason = True, ticket.abort_reason or reason

    def abort(self, request_ids: Sequence[str], owner: str = "") -> list[AbortOutcome]:
        """Ends requests of an owner (a key's name) by external id, matched exactly. Idempotent.

        Their streams end with finish reason ABORT.
        """
        if len(request_ids) > MAX_ABORT_IDS:
            limit = f"at most {MAX_ABORT_IDS} ids in one call"
            raise InvalidArgumentError([violation("request_ids", f"{len(request_ids)} ids", limit)])
        if not self.cores.sessions:
            raise self.cores.unavailable()
        return [self._abort_one(request_id, owner) for request_id in request_ids]

    def _abort_one(self, request_id: str, owner: str) -> AbortOutcome:
        found = self._tickets.find(request_id, owner)
        if isinstance(found, AbortOutcome):
            return found
        self._abort(found, AbortReason.ABORT_CALL)
        return AbortOutcome.ABORTED

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
        inputs = self.cores.inputs
        inputs.check_model(model)
        return inputs

    async def off_loop(self, function: Callable[..., T], *args: object) -> T:
        """Runs what may take long on a thread, so that the event loop answers everybody else meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args))


def _shutting_down() -> UnavailableError:
    return UnavailableError("the frontend is shutting down", retry_after_s=RETRY_AFTER_S, reason="SHUTDOWN")
