"""One connection to one core: its client, its requests, and the loop that feeds outputs to them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import replace

from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.input_processor import InputProcessor
from frontend_svc.outbox import Outbox
from frontend_svc.output_processor import Aborts, OutputProcessor
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.tickets import RETRY_AFTER_S, Ticket
from pagewire.engine import AbortReason, CoreStats, EngineRequest
from pagewire.errors import InvalidArgumentError, PagewireError, UnavailableError
from pagewire.runtime.log_fields import fields

log = logging.getLogger(__name__)

AVOID_S = 1.0
"""A core that refused a request gets none for so long while there are others: it drains, or has lost its worker."""
_ENGINE_REQUEST = re.compile(r"^requests\[\d+\]\.")


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
        inputs: makes requests for it, and for every other core of the same model.
        max_tokens_behind: see OutputProcessor.
        name: the core's address, for logs and as its name among others.
    """

    def __init__(self, client: EngineCoreClient, inputs: InputProcessor, max_tokens_behind: int, name: str) -> None:
        self.client = client
        self.inputs = inputs
        self.name = name
        self.outbox = Outbox()
        self.outputs = OutputProcessor(max_tokens_behind)
        self._tickets: set[Ticket] = set()
        self._num_children = 0
        self._num_of_others = 0
        self._avoided_until_s = 0.0
        self._aborts: Aborts = {}
        self._abort_task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        """Callers' requests that live here."""
        return len(self._tickets)

    @property
    def load(self) -> int:
        """Completions that the core has in hand: ours as of now, those of other frontends as of its last numbers."""
        return self._num_children + self._num_of_others

    @property
    def is_refusing(self) -> bool:
        """It has just refused a request."""
        return time.monotonic() < self._avoided_until_s

    def has_room(self, n: int) -> bool:
        """Whether `n` more completions of ours stay within what the core holds."""
        return self._num_children + n <= self.client.info.max_num_requests

    def release(self, ticket: Ticket) -> None:
        """Forgets a request of which nothing more is to come. Idempotent."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._num_children -= ticket.n
            if not self._tickets:
                self._idle.set()

    async def hand_over(
        self, ticket: Ticket, parent: ParentRequest, requests: list[EngineRequest]
    ) -> UnavailableError | None:
        """Registers a request and adds it to the core.

        Returns the error where the core did not take it and nothing came of it: then another core may, or `fail` ends
        it. Whatever else the core says ends the parent.
        """
        ticket.parent, ticket.session = parent, self
        if ticket.is_aborted:
            self.abort(ticket, AbortReason.ABORT_CALL)
            return None
        self._tickets.add(ticket)
        self._num_children += ticket.n
        self._idle.clear()
        self.outputs.add(parent)
        ticket.is_adding = True
        try:
            await self.client.add(requests)
        except UnavailableError as error:
            self._avoided_until_s = time.monotonic() + AVOID_S
            if parent.is_finished or any(child.num_received for child in parent.children):
                self.fail(parent, error)
                return None
            # The core may have it all the same: the answer can be what was lost.
            self.send(self.outputs.forget(parent, AbortReason.SIBLING_FAILED))
            self.release(ticket)
            return error
        except PagewireError as error:
            self.fail(parent, _in_callers_words(error))
        finally:
            ticket.is_adding = False
        return None

    def fail(self, parent: ParentRequest, error: PagewireError) -> None:
        """Ends a request with an error."""
        self.send(self.outputs.fail(parent, error, AbortReason.SIBLING_FAILED))

    def abort(self, ticket: Ticket, reason: AbortReason) -> None:
        """Ends a request that has a parent with finish reason ABORT; its waiter wakes."""
        if ticket.parent is not None and not ticket.parent.is_finished:
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
            if outputs.stats is not None:
                self._note(outputs.stats)
            aborts = self.outputs.process_outputs(outputs)
            if aborts:
                self.send(aborts)
            self.outbox.flush()
        raise UnavailableError("the core ended the stream of outputs", retry_after_s=RETRY_AFTER_S)

    def _note(self, stats: CoreStats) -> None:
        self._num_of_others = max(0, stats.num_running + stats.num_waiting - self._num_children)

    async def wait_idle(self) -> None:
        """Waits until no request lives here."""
        await self._idle.wait()

    def fail_all(self, error: PagewireError, reason: AbortReason | None = None) -> None:
        """Ends every request with an error; with a reason, tells the core too. Without, it is lost: what it is just
        being asked to take stays alive, for another core."""
        for ticket in list(self._tickets):
            if ticket.parent is None:
                continue
            if reason is not None:
                self.send(self.outputs.fail(ticket.parent, error, reason))
            elif not ticket.is_adding:
                self.outputs.fail(ticket.parent, error, AbortReason.SIBLING_FAILED)

    async def close(self) -> None:
        """Sends what is left to abort, and lets go of the core."""
        if self._abort_task is not None:
            await asyncio.wait([self._abort_task], timeout=1.0)
        await self.client.close()
