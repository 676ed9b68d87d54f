"""Which core gets a request: by prefix, bounded by load; the least loaded where there is nothing to share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from frontend_svc.balance import SLACK_REQUESTS, choose, prefix_key


@dataclass
class FakeCore:
    name: str
    load: int = 0


def cores(*loads: int) -> list[FakeCore]:
    return [FakeCore(f"10.0.0.{i}:50052", load) for i, load in enumerate(loads)]


def ids(*parts: range) -> np.ndarray:
    return np.concatenate([np.arange(p.start, p.stop, dtype=np.int32) for p in parts])


def test_key_is_the_prompts_beginning() -> None:
    """A conversation that goes on has the key of its beginning; another beginning or salt has another one."""
    assert prefix_key(ids(range(15))) == b""
    long = prefix_key(ids(range(300)))
    assert long == prefix_key(ids(range(256), range(7, 900)))
    assert prefix_key(ids(range(40))) == prefix_key(ids(range(32), range(5, 20)))
    assert long not in (prefix_key(ids(range(1, 301))), prefix_key(ids(range(300)), "salt"))


def test_same_prefix_same_core_and_prefixes_spread() -> None:
    """Every frontend chooses alike, many prefixes make even shares, and nothing is remembered of any.

    Case: production-stack#687
    """
    found = cores(0, 0, 0)
    keys = [prefix_key(ids(range(i, i + 64))) for i in range(3000)]
    chosen = [choose(found, key).name for key in keys]
    assert chosen == [choose(list(reversed(found)), key).name for key in keys]
    shares = Counter(chosen)
    assert len(shares) == 3
    assert min(shares.values()) > 850


def test_a_core_that_goes_moves_only_its_own_prefixes() -> None:
    found = cores(0, 0, 0, 0)
    keys = [prefix_key(ids(range(i, i + 64))) for i in range(500)]
    before = [choose(found, key).name for key in keys]
    after = [choose(found[1:], key).name for key in keys]
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {found[0].name}


def test_load_bounds_affinity() -> None:
    """One prompt that everybody shares fills all cores, each at most the slack above the least loaded.

    Case: production-stack#957
    """
    found = cores(0, 0, 0)
    key = prefix_key(ids(range(64)))
    order = []
    for _ in range(90):
        core = choose(found, key)
        core.load += 1
        order.append(core.name)
        assert core.load - min(c.load for c in found) <= max(SLACK_REQUESTS, 0.25 * min(c.load for c in found)) + 1
    assert len(set(order[: SLACK_REQUESTS + 1])) == 1
    assert min(c.load for c in found) >= 25


def test_without_a_prefix_the_least_loaded_and_ties_random() -> None:
    """Case: production-stack#957"""
    assert {choose(cores(3, 1, 2), b"").name for _ in range(50)} == {"10.0.0.1:50052"}
    shares = Counter(choose(cores(1, 1, 2), b"").name for _ in range(400))
    assert set(shares) == {"10.0.0.0:50052", "10.0.0.1:50052"}
    assert min(shares.values()) > 120
