"""What a core does per second, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from pagewire.top.data import Rates, Sample, hit_rate
from pagewire.top.format import (
    NOTHING,
    Glyphs,
    count,
    rate,
    share,
)
from pagewire.top.table import Column, table


@dataclass(frozen=True, slots=True)
class _Figures:
    name: str
    values: tuple[str, ...]


def rates(now: Sample, found: Rates | None, width: int, glyphs: Glyphs) -> list[Text]:
    """What happens per second, and what happened since the core started."""
    stats = now.core.stats
    per_second = _Figures("per second", (NOTHING,) * 6)
    if found is not None:
        numbers = (found.generated_tokens, found.scheduled_tokens, found.requests, found.steps, found.preemptions)
        per_second = _Figures("per second", (*map(rate, numbers), share(found.hit_rate)))
    in_all = _Figures("in all", (NOTHING,) * 6)
    if stats is not None:
        totals = (
            stats.num_generated_tokens,
            stats.num_scheduled_tokens,
            stats.num_finished,
            stats.num_steps,
            stats.num_preemptions,
        )
        in_all = _Figures("in all", (*map(count, totals), share(hit_rate(stats))))
    titles = ("TOKENS OUT", "COMPUTED", "REQUESTS", "STEPS", "PREEMPTED", "CACHE HITS")
    columns = [Column[_Figures]("", 10, lambda f: f.name, is_left=True)]
    columns += [Column[_Figures](title, 10, lambda f, i=i: f.values[i]) for i, title in enumerate(titles)]  # type: ignore[misc]
    return table(columns, [per_second, in_all], width, glyphs)
