"""The resumable log of prefix cache events: a bounded history, and a mirror of the cache for late readers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core_svc.block_hash import BYTES_PER_TOKEN
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

SNAPSHOT_BLOCKS = 4096
"""Blocks per batch of a snapshot, so that no message comes near the limit."""


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events of one step. A snapshot may take several batches, the last of which has the number of the step."""

    sequence: int
    """Counts batches from 1, without gaps; 0 before the end of a snapshot: who breaks off there has to start anew."""
    time_ns: int
    """Wall clock."""
    events: Sequence[KvEvent]


class KvEventLog:
    """Batches by sequence number, the newest `max_batches` of them. Thread-safe; appended on the engine thread."""

    def __init__(self, max_batches: int = 4096, notify: Callable[[], None] = lambda: None) -> None:
        """`notify` is called after each append, on the appending thread."""
        self._notify = notify
        self._lock = threading.Lock()
        self._batches: deque[KvEventBatch] = deque(maxlen=max_batches)
        self._stored: dict[bytes, BlockStored] = {}
        self._last_sequence = 0

    @property
    def last_sequence(self) -> int:
        """Number of the newest batch; 0 before the first."""
        return self._last_sequence

    def append(self, events: Sequence[KvEvent]) -> None:
        """Adds the events of one step as the next batch."""
        if not events:
            return
        with self._lock:
            for event in events:
                self._mirror(event)
            self._last_sequence += 1
            self._batches.append(KvEventBatch(self._last_sequence, time.time_ns(), tuple(events)))
        self._notify()

    def read(self, start_sequence: int, max_batches: int = 64) -> list[KvEventBatch]:
        """Batches from `start_sequence` on, or a snapshot where that one is no longer (or not yet) known.

        A snapshot begins with AllBlocksCleared; the reader goes on after its sequence number. Empty: nothing new.
        """
        with self._lock:
            start = max(start_sequence, 1)
            if start == self._last_sequence + 1:
                return []
            oldest = self._batches[0].sequence if self._batches else 1
            if not oldest <= start <= self._last_sequence:
                return self._snapshot()
            first = start - oldest
            return [self._batches[i] for i in range(first, min(first + max_batches, len(self._batches)))]

    def _mirror(self, event: KvEvent) -> None:
        match event:
            case AllBlocksCleared():
                self._stored.clear()
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    self._stored.pop(block_hash, None)
            case BlockStored(block_hashes=(block_hash,)):
                self._stored[block_hash] = event
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size * BYTES_PER_TOKEN
                for i, block_hash in enumerate(event.block_hashes):
                    token_ids = event.token_ids[i * size : (i + 1) * size]
                    self._stored[block_hash] = BlockStored(
                        (block_hash,), parent, token_ids, event.block_size, event.adapter
                    )
                    parent = block_hash

    def _snapshot(self) -> list[KvEventBatch]:
        now_ns = time.time_ns()
        events: list[KvEvent] = [AllBlocksCleared(), *self._stored.values()]
        parts = [tuple(events[i : i + SNAPSHOT_BLOCKS]) for i in range(0, len(events), SNAPSHOT_BLOCKS)]
        *first, last = parts
        return [*(KvEventBatch(0, now_ns, part) for part in first), KvEventBatch(self._last_sequence, now_ns, last)]
