"""Figures, kept in one CSV: a run replaces the figures that it took and leaves the others."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.statistic import summarize


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what was measured, its median and range over the passes, and when, where and how."""

    key: str
    """Identifies the figure: section, then what, then who; `a:b` is a ratio of a to b."""
    name: str
    unit: str
    median: float
    low: float
    high: float
    passes: int
    date: str
    machine: str
    command: str
    note: str = ""
    """Why there is no figure, where a side failed: the numbers are 0 then."""

    @property
    def section(self) -> str:
        return self.key.partition("/")[0]

    @property
    def has_failed(self) -> bool:
        return self.passes == 0


class Recorder:
    """Takes the figures of one run and prints each as it comes."""

    def __init__(self, date: str, machine: str, command: str) -> None:
        self._taken_with = (date, machine, command)
        self.figures: list[Figure] = []

    def add(self, key: str, name: str, unit: str, values: Sequence[float]) -> None:
        """A figure with one value per pass."""
        found = summarize(values)
        figure = Figure(key, name, unit, found.median, found.low, found.high, found.num, *self._taken_with)
        self.figures.append(figure)
        print(f"  {name:<76} {number(figure.median):>9} {unit:<6} ({spread(figure)})", flush=True)

    def fail(self, key: str, name: str, error: str) -> None:
        """A figure that could not be taken, and why."""
        note = " ".join(error.split())[:300]
        self.figures.append(Figure(key, name, "", 0, 0, 0, 0, *self._taken_with, note))
        print(f"  {name:<76}    FAILED ({note})", flush=True)


def number(value: float) -> str:
    """Two decimals, none from 100 up."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def spread(figure: Figure) -> str:
    if figure.has_failed:
        return figure.note
    return f"{number(figure.low)}-{number(figure.high)} of {figure.passes}"


def read(path: Path) -> list[Figure]:
    """The figures of a CSV; none where there is no file."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Figure)}
    convert = {"float": float, "int": int, "str": str}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [Figure(**{name: convert[str(kinds[name])](text) for name, text in row.items()}) for row in rows]


def merge(old: Iterable[Figure], new: Iterable[Figure]) -> list[Figure]:
    """New figures in the place of old ones of the same key, the rest behind. A failure too: it is what is true now."""
    return list({figure.key: figure for figure in [*old, *new]}.values())


def write(path: Path, figures: Iterable[Figure]) -> None:
    names = [field.name for field in fields(Figure)]
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        for figure in figures:
            values = [getattr(figure, name) for name in names]
            table.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
