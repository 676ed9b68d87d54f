"""One connection to one core: its client, its requests, and the loop that feeds outputs to them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from dataclasses import dataclass, replace

from frontend_svc.chat_template import ChatTemplate
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.input_processor import InputProcessor
from frontend_svc.outbox import Outbox
from frontend_svc.output_processor import Aborts, OutputProcessor
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import AbortOutcome, AbortReason, EngineRequest
from pagewire.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.runtime.log_fields import fields

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
MAX_ENDED_IDS = 4096
_ENGINE_REQUEST = re.compile(r"^requests\[\d+\]\.")


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place, held from before it is tokenized until its last output is taken."""

    external_request_id: str
    n: int
    parent: ParentRequest | None = None
    is_aborted: bool = False
    """Someone called Abort before it was handed to the core."""
    abort_reason: AbortReason | None = None
    """Why this frontend ended it, if it did."""


def _in_callers_words(error: PagewireError) -> PagewireError:
    """Names fields as the caller wrote them: the core's `requests[0].sampling_params.n` is `sampling_params.n`."""
    if not isinstance(error, InvalidArgumentError) or not error.violations:
        return error
    named = [replace(v, field=_ENGINE_REQUEST.sub("", v.field)) for v in error.violations]
    return InvalidArgumentError(list(dict.fromkeys(named)), reason=error.reason)


class CoreSession:
    """What lives and dies with a connection to a core.

    Args:
        client: the core.
        max_tokens_behind: see OutputProcessor.
        outbox: sends what comes to the callers.
    """

    def __init__(self, client: EngineCoreClient, max_tokens_behind: int, outbox: Outbox) -> None:
        self.client = client
        self.outbox = outbox
        tokenizer = Tokenizer(client.tokenizer_files)
        self.inputs = InputProcessor(client.info, tokenizer, ChatTemplate(client.tokenizer_files, tokenizer))
        self.outputs = OutputProcessor(max_tokens_behind)
        self._tickets: dict[str, Ticket] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._num_children = 0
        self._aborts: Aborts = {}
        self._abort_task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def reserve(self, external_request_id: str, n: int) -> Ticket:
        """Takes a place for a request.

        Raises:
            AlreadyExistsError: a living request has this id.
            ResourceExhaustedError: the core holds as many requests as it takes.
        """
        if external_request_id in self._tickets:
            raise AlreadyExistsError(
                f"request_id {external_request_id!r} belongs to a request that is still alive",
                metadata={"field": "request_id", "request_id": external_request_id},
            )
        limit = self.client.info.max_num_requests
        if self._num_children + n > limit:
            raise ResourceExhaustedError(
                f"{self._num_children} requests are in flight and {n} more would exceed the limit of {limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        ticket = Ticket(external_request_id, n)
        self._tickets[external_request_id] = ticket
        self._num_children += n
        self._idle.clear()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Gives the place back; the id may be used again. Idempotent."""
        if self._tickets.get(ticket.external_request_id) is not ticket:
            return
        del self._tickets[ticket.external_request_id]
        self._num_children -= ticket.n
        self._ended[ticket.external_request_id] = None
        if len(self._ended) > MAX_ENDED_IDS:
            self._ended.popitem(last=False)
        if not self._tickets:
            self._idle.set()

    @property
    def num_requests(self) -> int:
        """Callers' requests that live."""
        return len(self._tickets)

    async def hand_over(self, ticket: Ticket, parent: ParentRequest, requests: list[EngineRequest]) -> None:
        """Registers a request and adds it to the core. A failure of the core ends the parent with it."""
        ticket.parent = parent
        if ticket.is_aborted:
            self.abort(ticket, AbortReason.ABORT_CALL)
            return
        self.outputs.add(parent)
        try:
            await self.client.add(requests)
        except PagewireError as error:
            self.send(self.outputs.fail(parent, _in_callers_words(error), AbortReason.SIBLING_FAILED))

    def abort(self, ticket: Ticket, reason: AbortReason) -> None:
        """Ends a request with finish reason ABORT, wherever it is; its waiter wakes."""
        if ticket.parent is None:
            ticket.is_aborted, ticket.abort_reason = True, ticket.abort_reason or reason
            return
        if not ticket.parent.is_finished:
            ticket.abort_reason = reason
            usage = ticket.parent.usage
            log.info(
                "request aborted",
                extra=fields(
                    request_id=ticket.external_request_id,
                    abort_reason=reason.name,
                    prompt_tokens=usage.num_prompt_tokens,
                    completion_tokens=usage.num_completion_tokens,
                ),
            )
            self.send(self.outputs.abort(ticket.parent, reason))

    def abort_by_external_id(self, external_request_id: str) -> AbortOutcome:
        """Ends the request of exactly this id."""
        ticket = self._tickets.get(external_request_id)
        if ticket is None:
            is_ended = external_request_id in self._ended
            return AbortOutcome.ALREADY_FINISHED if is_ended else AbortOutcome.NOT_FOUND
        if ticket.is_aborted or (ticket.parent is not None and ticket.parent.is_finished):
            return AbortOutcome.ALREADY_FINISHED
        self.abort(ticket, AbortReason.ABORT_CALL)
        return AbortOutcome.ABORTED

    def send(self, aborts: Aborts) -> None:
        """Tells the core what to end, soon; calls made meanwhile travel together."""
        for reason, ids in aborts.items():
            self._aborts.setdefault(reason, []).extend(ids)
        if self._aborts and self._abort_task is None:
            self._abort_task = asyncio.get_running_loop().create_task(self._send_aborts())

    async def _send_aborts(self) -> None:
        try:
            while self._aborts:
                aborts, self._aborts = self._aborts, {}
                # At once: the core answers after a step, and one reason must not wait for another's answer.
                await asyncio.gather(*(self._send_abort(ids, reason) for reason, ids in aborts.items()))
        finally:
            self._abort_task = None

    async def _send_abort(self, ids: list[int], reason: AbortReason) -> None:
        try:
            await self.client.abort(ids, reason)
        except PagewireError as error:
            # The core is in a long step and ends them after it; or it is gone, and its lease ends what it has of ours.
            log.warning("the core has not confirmed the end of %d requests (%s): %s", len(ids), reason.name, error)

    async def pump(self) -> None:
        """Feeds outputs until the core is lost. Raises the error that says why."""
        async for outputs in self.client.outputs():
            aborts = self.outputs.process_outputs(outputs)
            if aborts:
                self.send(aborts)
            self.outbox.flush()
        raise UnavailableError("the core ended the stream of outputs", retry_after_s=RETRY_AFTER_S)

    async def wait_idle(self) -> None:
        """Waits until no request lives."""
        await self._idle.wait()

    def fail_all(self, error: PagewireError, reason: AbortReason | None = None) -> None:
        """Ends every request with an error; with a reason, tells the core too."""
        for ticket in list(self._tickets.values()):
            if ticket.parent is None:
                continue
            if reason is None:
                ticket.parent.fail(error)
            else:
                self.send(self.outputs.fail(ticket.parent, error, reason))
        self.outputs.fail_all(error)

    async def close(self) -> None:
        """Sends what is left to abort, and lets go of the core."""
        if self._abort_task is not None:
            await asyncio.wait([self._abort_task], timeout=1.0)
        await self.client.close()
