"""The living requests of a frontend by who sent them and under which id, over all of its cores."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend_svc.parallel_sampling import ParentRequest
from pagewire.engine import AbortOutcome, AbortReason
from pagewire.errors import AlreadyExistsError, ResourceExhaustedError

if TYPE_CHECKING:
    from frontend_svc.session import CoreSession

RETRY_AFTER_S = 1.0
MAX_ENDED_IDS = 4096


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place, held from before it is tokenized until its last output is taken."""

    external_request_id: str
    n: int
    owner: str = ""
    """Name of the API key it came with; an id means something to its owner only."""
    parent: ParentRequest | None = None
    """Set once a core gets it."""
    session: CoreSession | None = None
    """The core that has it."""
    is_adding: bool = False
    """A core is being asked to take it; should that core be lost now, another one may."""
    is_aborted: bool = False
    """Someone called Abort before it was handed to a core."""
    abort_reason: AbortReason | None = None
    """Why this frontend ended it, if it did."""


class Tickets:
    """All of them."""

    def __init__(self) -> None:
        self._living: dict[tuple[str, str], Ticket] = {}
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._num_children = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._living)

    def reserve(self, external_request_id: str, n: int, owner: str, limit: int) -> Ticket:
        """Takes a place for a request with `n` completions.

        Raises:
            AlreadyExistsError: a living request of the same owner has this id.
            ResourceExhaustedError: the cores together hold as many requests as they take, `limit`.
        """
        key = (owner, external_request_id)
        if key in self._living:
            raise AlreadyExistsError(
                f"request_id {external_request_id!r} belongs to a request that is still alive",
                metadata={"field": "request_id", "request_id": external_request_id},
            )
        if self._num_children + n > limit:
            raise ResourceExhaustedError(
                f"{self._num_children} requests are in flight and {n} more would exceed the limit of {limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        ticket = self._living[key] = Ticket(external_request_id, n, owner)
        self._num_children += n
        self._idle.clear()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Gives the place back; the id may be used again. Idempotent."""
        key = (ticket.owner, ticket.external_request_id)
        if self._living.get(key) is not ticket:
            return
        del self._living[key]
        self._num_children -= ticket.n
        self._ended[key] = None
        if len(self._ended) > MAX_ENDED_IDS:
            self._ended.popitem(last=False)
        if not self._living:
            self._idle.set()

    def find(self, external_request_id: str, owner: str) -> Ticket | AbortOutcome:
        """The request that an abort of exactly this id ends, or why there is nothing to end."""
        key = (owner, external_request_id)
        ticket = self._living.get(key)
        if ticket is None:
            return AbortOutcome.ALREADY_FINISHED if key in self._ended else AbortOutcome.NOT_FOUND
        if ticket.is_aborted or (ticket.parent is not None and ticket.parent.is_finished):
            return AbortOutcome.ALREADY_FINISHED
        return ticket

    async def wait_idle(self) -> None:
        """Waits until no request lives."""
        await self._idle.wait()
