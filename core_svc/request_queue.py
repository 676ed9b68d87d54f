"""The requests that wait, in the order in which they are served."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from core_svc.request import Request, RequestStatus

_Entry = tuple[tuple[int, int, int], Request]


class RequestQueue:
    """A heap on `Request.order`.

    The policy is the order, not the structure: under fcfs the order is the arrival at the core, so that a preempted
    request comes back in front of everything that never ran; under priority it is (priority, arrival at the frontend,
    arrival at the core). Requests that ended while they waited stay in the heap until they surface or outnumber the
    living.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._num_ended = 0
        self.num_aside = 0
        """Those that stepped aside when the scheduler looked at them last: another request computes their prefix."""

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def entries(self) -> list[_Entry]:
        """All entries, the ended ones too, in no order; a copy, for readers on other threads."""
        return self._heap.copy()

    def push(self, request: Request) -> None:
        """Adds a request. Orders are unique, they end in the arrival's sequence number."""
        heapq.heappush(self._heap, (request.order, request))

    def put_back(self, aside: Sequence[Request]) -> None:
        """Adds those that stepped aside, and notes how many."""
        self.num_aside = len(aside)
        for request in aside:
            self.push(request)

    def peek(self) -> Request | None:
        """The next request, or None."""
        while self._heap and self._heap[0][1].status.is_finished:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0][1] if self._heap else None

    def peek_preempted(self) -> Request | None:
        """The next one of those that ran before, or None. Looks at all that wait: for pauses, not for every step."""
        preempted = (entry for entry in self._heap if entry[1].status is RequestStatus.PREEMPTED)
        found = min(preempted, default=None)
        return found[1] if found is not None else None

    def remove(self, request: Request) -> None:
        """Takes a request that waits; the next one at the cost of a heap, others at that of a list."""
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
        else:
            self._heap.remove((request.order, request))
            heapq.heapify(self._heap)

    def note_ended(self) -> None:
        """One of the requests in here ended."""
        self._num_ended += 1
        if self._num_ended * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].status.is_finished]
            heapq.heapify(self._heap)
            self._num_ended = 0
