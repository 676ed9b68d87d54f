"""KvEventLog: resumable, bounded, and complete for readers that come too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_svc import kv_event_log
from core_svc.kv_event_log import KvEventBatch, KvEventLog
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from pagewire.columns import pack_int32


def block(i: int) -> bytes:
    return i.to_bytes(32, "big")


class Router:
    """What a reader of the log does: keeps the set of hashes, and its place."""

    def __init__(self) -> None:
        self.next_sequence = 1
        self.hashes: dict[bytes, tuple[bytes, bytes]] = {}
        self.num_snapshots = 0

    def read(self, log: KvEventLog) -> None:
        while batches := log.read(self.next_sequence):
            for batch in batches:
                self.apply(batch)

    def apply(self, batch: KvEventBatch) -> None:
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.hashes.clear()
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.hashes[block_hash]
                case BlockStored():
                    parent = event.parent_block_hash
                    for i, block_hash in enumerate(event.block_hashes):
                        tokens = event.token_ids[4 * i * event.block_size : 4 * (i + 1) * event.block_size]
                        self.hashes[block_hash] = (parent, tokens)
                        parent = block_hash
        self.next_sequence = batch.sequence + 1


def test_sequences_have_no_gaps_and_readers_resume() -> None:
    notified = []
    log = KvEventLog(notify=lambda: notified.append(1))
    log.append([])
    assert (log.last_sequence, notified) == (0, [])
    for i in range(5):
        log.append([BlockStored((block(i),), b"", pack_int32((i,)), 1)])
    assert [batch.sequence for batch in log.read(0)] == [1, 2, 3, 4, 5]
    assert [batch.sequence for batch in log.read(4)] == [4, 5]
    assert log.read(6) == []
    assert len(notified) == 5


def test_a_gap_starts_with_a_snapshot() -> None:
    log = KvEventLog(max_batches=2)
    log.append([BlockStored((block(1), block(2)), b"", pack_int32((1, 2, 3, 4)), 2)])
    log.append([BlockRemoved((block(1),))])
    log.append([BlockStored((block(3),), block(2), pack_int32((5, 6)), 2)])
    (batch,) = log.read(1)
    assert batch.sequence == 3
    assert batch.events == (
        AllBlocksCleared(),
        BlockStored((block(2),), block(1), pack_int32((3, 4)), 2),
        BlockStored((block(3),), block(2), pack_int32((5, 6)), 2),
    )
    # A number of another core's life is a gap too.
    assert isinstance(log.read(77)[0].events[0], AllBlocksCleared)
    empty = KvEventLog().read(5)
    assert (empty[0].sequence, list(empty[0].events)) == (0, [AllBlocksCleared()])


def test_a_large_snapshot_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_log, "SNAPSHOT_BLOCKS", 3)
    log = KvEventLog(max_batches=1)
    for i in range(8):
        log.append([BlockStored((block(i),), b"", pack_int32((i,)), 1)])
    batches = log.read(1)
    assert [len(batch.events) for batch in batches] == [3, 3, 3]
    assert [batch.sequence for batch in batches] == [0, 0, 8], "who has only a part of it must not go on from 8"


change = st.one_of(
    st.tuples(st.just("store"), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("read"), st.integers(0, 1)),
)


@given(st.lists(change, max_size=60), st.integers(1, 5))
def test_every_reader_ends_with_the_same_cache(changes: list[tuple[str, object]], max_batches: int) -> None:
    """Readers that read now and then, over a history of a few batches, agree with one that read everything."""
    log, complete = KvEventLog(max_batches), KvEventLog(10_000)
    readers, steady = [Router(), Router()], Router()
    stored: set[int] = set()
    for kind, argument in changes:
        events: list[KvEvent] = []
        if kind == "store":
            ids = [i for i in argument if i not in stored]  # type: ignore[attr-defined]
            if ids:
                events = [BlockStored(tuple(map(block, ids)), b"", pack_int32(ids), 1)]
                stored.update(ids)
        elif kind == "remove" and argument in stored:
            events = [BlockRemoved((block(argument),))]  # type: ignore[arg-type]
            stored.discard(argument)  # type: ignore[arg-type]
        elif kind == "clear":
            events = [AllBlocksCleared()]
            stored.clear()
        elif kind == "read":
            readers[argument].read(log)  # type: ignore[call-overload]
        log.append(events)
        complete.append(events)
    steady.read(complete)
    for reader in readers:
        reader.read(log)
        assert reader.hashes == steady.hashes
    assert {int.from_bytes(h, "big") for h in steady.hashes} == stored
