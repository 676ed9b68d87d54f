"""Passes of several sides in turn, so that a machine whose speed drifts is fair to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Passes(Generic[T]):
    """What each side's passes gave, in order; an error for each side that failed, which then has no more passes."""

    results: dict[str, list[T]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def alternate(sides: Mapping[str, Callable[[], T]], repeats: int, max_seconds: float) -> Passes[T]:
    """Each repeat runs every side once, and every other repeat in the reverse order. None starts after max_seconds,
    but each side has its first pass.
    """
    found: Passes[T] = Passes({name: [] for name in sides})
    started = time.monotonic()
    for repeat in range(repeats):
        if repeat and time.monotonic() - started > max_seconds:
            break
        names = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        for name in names:
            if name in found.errors:
                continue
            try:
                found.results[name].append(sides[name]())
            except Exception as error:  # one side's failure is its row's text, and no other side's
                found.errors[name] = f"{type(error).__name__}: {error}"
    return found
