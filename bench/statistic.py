"""Medians, percentiles and ratios pair by pair: pure functions on lists of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and range over so many passes."""

    median: float
    low: float
    high: float
    num: int


def summarize(values: Sequence[float]) -> Summary:
    """Raises ValueError where there is nothing, or something that is no number."""
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"nothing to summarize in {list(values)}")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all do not exceed: always one that was measured."""
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours / theirs, pass by pass; a pass that one side lacks (it failed, time was up) has no ratio."""
    return [mine / other for mine, other in zip(ours, theirs, strict=False)]
