"""What `pagewire top` shows, as plain data: one look at a deployment, rates between two, and both as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from pagewire.engine import CoreStats
from pagewire.stats import BlockState, CoreDetail, FrontendStats, RequestState, WorkerStats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one service said."""

    target: str
    health: str
    """ready, not ready, unknown, or down."""
    stats: T | None
    error: str = ""
    """Why there are no stats."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    taken_s: float
    """Monotonic."""
    wall_s: float
    frontend: Answer[FrontendStats]
    core: Answer[CoreStats]
    worker: Answer[WorkerStats]

    @property
    def detail(self) -> CoreDetail:
        """The core's; an empty one while it does not answer."""
        stats = self.core.stats
        return stats.detail if stats is not None and stats.detail is not None else CoreDetail()


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second between two looks at the same life of a core."""

    generated_tokens: float
    scheduled_tokens: float
    requests: float
    preemptions: float
    steps: float
    hit_rate: float | None
    """Share of the prompt tokens looked up that were in the prefix cache; None where none was looked up."""


def rates_between(before: Sample | None, now: Sample) -> Rates | None:
    """None where there is nothing to compare: one look only, a core that is down, or another one than before."""
    old, new = before.core.stats if before is not None else None, now.core.stats
    if before is None or old is None or new is None or now.taken_s <= before.taken_s:
        return None
    if before.detail.process.incarnation != now.detail.process.incarnation:
        return None
    seconds = now.taken_s - before.taken_s

    def rate(name: str) -> float:
        return float(getattr(new, name) - getattr(old, name)) / seconds

    num_queries = new.prefix_cache_queries - old.prefix_cache_queries
    num_hits = new.prefix_cache_hits - old.prefix_cache_hits
    return Rates(
        generated_tokens=rate("num_generated_tokens"),
        scheduled_tokens=rate("num_scheduled_tokens"),
        requests=rate("num_finished"),
        preemptions=rate("num_preemptions"),
        steps=rate("num_steps"),
        hit_rate=num_hits / num_queries if num_queries else None,
    )


def hit_rate(stats: CoreStats) -> float | None:
    """Since the core started."""
    return stats.prefix_cache_hits / stats.prefix_cache_queries if stats.prefix_cache_queries else None


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by what they are used for; estimates where only every so many-th was told."""

    free: int
    cached: int
    used: int
    shared: int


def block_counts(detail: CoreDetail) -> BlockCounts | None:
    """None where no block was told."""
    blocks = detail.blocks
    if not blocks.states:
        return None
    found = Counter(blocks.states)

    def count(state: BlockState) -> int:
        return round(found[state] * blocks.num_blocks / len(blocks.states))

    return BlockCounts(*(count(state) for state in BlockState))


_SINGULAR = {
    "external_request_ids": "external_request_id",
    "request_ids": "request_id",
    "child_indices": "child_index",
    "states": "state",
    "priorities": "priority",
    "ages_ms": "age_ms",
    "numbers": "number",
    "ages_us": "age_us",
}


def _rows(columns: Any) -> list[dict[str, Any]]:
    """Parallel columns as one dictionary per row."""
    found: dict[str, list[Any]] = {}
    for field in fields(columns):
        value = getattr(columns, field.name)
        if isinstance(value, np.ndarray):
            found[field.name] = value.tolist()
        elif isinstance(value, list):
            found[field.name] = value
    names = [_SINGULAR.get(name, name) for name in found]
    return [dict(zip(names, row, strict=True)) for row in zip(*found.values(), strict=True)]


def to_json(sample: Sample, rates: Rates | None) -> dict[str, Any]:
    """Everything that a screen can show, for scripts."""
    detail = sample.detail
    requests = _rows(detail.requests)
    for row, debt in zip(requests, detail.requests.debts.tolist(), strict=True):
        row["state"] = RequestState(row["state"]).name.lower()
        row["debt"] = debt
    counts = block_counts(detail)
    blocks = {"num_blocks": detail.blocks.num_blocks, "stride": detail.blocks.stride}
    return {
        "time": sample.wall_s,
        "services": {
            "frontend": _service(sample.frontend),
            "core": _service(sample.core),
            "worker": _service(sample.worker),
        },
        "rates": None if rates is None else asdict(rates),
        "num_requests": detail.requests.num_total,
        "requests": requests,
        "steps": _rows(detail.steps),
        "blocks": {**blocks, **({} if counts is None else asdict(counts))},
    }


def _service(answer: Answer[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"target": answer.target, "health": answer.health, "error": answer.error, "stats": None}
    if answer.stats is not None:
        stats = answer.stats
        found["stats"] = {
            field.name: _plain(getattr(stats, field.name)) for field in fields(stats) if field.name != "detail"
        }
        if isinstance(stats, CoreStats) and stats.detail is not None:
            plain = {name: getattr(stats.detail, name) for name in _DETAIL_NUMBERS}
            found["stats"] |= {name: _plain(value) for name, value in plain.items()}
    return found


_DETAIL_NUMBERS = [field.name for field in fields(CoreDetail) if field.name not in ("requests", "steps", "blocks")]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
