"""Outputs of one frontend between the engine thread and its stream: numbered, merged under pressure, kept for resend.

engine thread ── append ──▶ pending ── take ──▶ stream
                                          └──▶ unacknowledged ── acknowledge ──▶ gone
                                                    └── reopen ──▶ pending
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping

from core_svc.merge_outputs import merge, missing_part, outputs_bytes
from pagewire.engine import StepOutputs

MERGE_BYTES = 2**20
"""No merged message grows beyond this, so that none comes near the message limit."""
MERGE_EVERY = 64
"""Messages that may pile up before they are merged."""
MAX_FORGOTTEN = 8192
"""Ended requests whose ids are remembered."""


class OutputBuffer:
    """The outputs of one frontend incarnation. Thread-safe: the engine thread appends, the event loop does the rest.

    Bounds: at most `max_bytes` wait to be sent; an append beyond that sets `has_overflowed`, and the owner drops the
    frontend. At most `max_bytes` of sent outputs are kept; the oldest are forgotten beyond that, and a reopen that
    would need them reports the request as unknown.
    """

    def __init__(self, max_bytes: int = 128 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pending = _Log()
        self._unacknowledged = _Log()
        self._last_sequence = 0
        self._live: set[int] = set()
        self._finished: set[int] = set()
        self._forgotten: dict[int, None] = {}
        """Ids whose end was acknowledged, oldest first: an Add that is repeated late must not count as new."""
        self._lost_up_to: dict[int, int] = {}
        self.has_overflowed = False

    def knows_all(self, request_ids: Iterable[int]) -> bool:
        """Whether each of the requests lives or has ended lately."""
        with self._lock:
            return all(i in self._live or i in self._finished or i in self._forgotten for i in request_ids)

    def register(self, request_ids: Iterable[int]) -> list[int]:
        """Notes requests before they are handed to the engine; returns the ones that were not known yet."""
        with self._lock:
            known = (self._live, self._finished, self._forgotten)
            new = [i for i in request_ids if not any(i in ids for ids in known)]
            self._live.update(new)
            return new

    def unregister(self, request_ids: Iterable[int]) -> None:
        """Takes back `register`, where the engine refused the requests."""
        with self._lock:
            self._live.difference_update(request_ids)

    def append(self, outputs: StepOutputs) -> bool:
        """Adds a step's outputs; False where the reader is too far behind and nothing was kept."""
        with self._lock:
            if self.has_overflowed:
                return False
            for finished in outputs.finished:
                request_id = int(outputs.request_ids[finished.row])
                self._live.discard(request_id)
                self._finished.add(request_id)
            self._pending.append(outputs)
            self.has_overflowed = self._pending.num_bytes > self._max_bytes
            return not self.has_overflowed

    def take(self) -> StepOutputs | None:
        """The next message to send: all that waits, merged up to a size; None where nothing waits."""
        with self._lock:
            outputs = self._pending.pop_merged()
            if outputs is None:
                return None
            self._last_sequence += 1
            outputs.sequence = self._last_sequence
            if len(outputs.request_ids):
                self._unacknowledged.append(outputs)
                while self._unacknowledged.num_bytes > self._max_bytes and len(self._unacknowledged) > 1:
                    self._forget(self._unacknowledged.pop_first())
            return outputs

    def acknowledge(self, sequence: int, finished_request_ids: Iterable[int] = ()) -> None:
        """Forgets what the frontend has received: messages up to `sequence`, and these requests altogether."""
        with self._lock:
            while (first := self._unacknowledged.first()) is not None and first.sequence <= sequence:
                self._unacknowledged.pop_first()
                for finished in first.finished:
                    self._drop_finished(int(first.request_ids[finished.row]))
            for request_id in finished_request_ids:
                self._drop_finished(request_id)

    def reopen(self, num_received: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Puts what the frontend lacks back in front of the queue.

        `num_received`: output tokens that it has, by request that it still wants. Returns the named requests that are
        not known (or whose tokens are no longer kept), and the live requests that the frontend does not want.
        """
        with self._lock:
            known = self._live | self._finished
            wanted = {
                request_id: count
                for request_id, count in num_received.items()
                if request_id in known and self._lost_up_to.get(request_id, 0) <= count
            }
            unknown = [request_id for request_id in num_received if request_id not in wanted]
            unwanted = sorted(self._live - wanted.keys())
            kept = [*self._unacknowledged.drain(), *self._pending.drain()]
            for outputs in kept:
                part = missing_part(outputs, wanted)
                if part is not None:
                    self._pending.append(part)
            self._finished &= wanted.keys()
            return unknown, unwanted

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be sent."""
        return len(self._pending) > 0

    @property
    def num_live(self) -> int:
        """Requests whose finish was not published yet."""
        return len(self._live)

    @property
    def num_bytes(self) -> int:
        """Memory held, about."""
        return self._pending.num_bytes + self._unacknowledged.num_bytes

    def _drop_finished(self, request_id: int) -> None:
        if request_id in self._finished:
            self._finished.remove(request_id)
            self._forgotten[request_id] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
        self._lost_up_to.pop(request_id, None)

    def _forget(self, outputs: StepOutputs) -> None:
        """Outputs leave unacknowledged: a reopen can serve only frontends that have them."""
        rows = zip(outputs.request_ids.tolist(), outputs.offsets.tolist(), outputs.num_tokens.tolist(), strict=True)
        for request_id, offset, num_tokens in rows:
            self._lost_up_to[request_id] = max(self._lost_up_to.get(request_id, 0), offset + num_tokens)
        for finished in outputs.finished:
            self._drop_finished(int(outputs.request_ids[finished.row]))


class _Log:
    """Outputs in order with their size. Small neighbours are merged once enough pile up: amortized constant work."""

    def __init__(self) -> None:
        self._entries: deque[tuple[StepOutputs, int]] = deque()
        self._merge_at = MERGE_EVERY
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, outputs: StepOutputs) -> None:
        size = outputs_bytes(outputs)
        self._entries.append((outputs, size))
        self.num_bytes += size
        if len(self._entries) >= self._merge_at:
            self._compact()

    def first(self) -> StepOutputs | None:
        return self._entries[0][0] if self._entries else None

    def pop_first(self) -> StepOutputs:
        outputs, size = self._entries.popleft()
        self.num_bytes -= size
        self._merge_at = max(MERGE_EVERY, min(self._merge_at, len(self._entries) + MERGE_EVERY))
        return outputs

    def pop_merged(self) -> StepOutputs | None:
        """The first entry, merged with as many of the next ones as MERGE_BYTES takes."""
        if not self._entries:
            return None
        parts = [self._entries[0]]
        size = parts[0][1]
        self.pop_first()
        while self._entries and size + self._entries[0][1] <= MERGE_BYTES:
            size += self._entries[0][1]
            parts.append(self._entries[0])
            self.pop_first()
        return merge([outputs for outputs, _ in parts])

    def drain(self) -> list[StepOutputs]:
        entries = [outputs for outputs, _ in self._entries]
        self._entries.clear()
        self.num_bytes = 0
        self._merge_at = MERGE_EVERY
        return entries

    def _compact(self) -> None:
        entries = list(self._entries)
        self._entries.clear()
        self.num_bytes = 0
        group: list[StepOutputs] = []
        group_bytes = 0
        for outputs, size in entries:
            if group and group_bytes + size > MERGE_BYTES:
                self._push(group)
                group, group_bytes = [], 0
            group.append(outputs)
            group_bytes += size
        self._push(group)
        self._merge_at = len(self._entries) + MERGE_EVERY

    def _push(self, group: list[StepOutputs]) -> None:
        outputs = merge(group)
        size = outputs_bytes(outputs)
        self._entries.append((outputs, size))
        self.num_bytes += size
