"""Columns that hold several entries per row, one row after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def rows_and_places(counts: npt.NDArray[np.integer]) -> tuple[Indices, Indices]:
    """For each entry of a column with `counts` entries per row: its row, and its place among the row's entries."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def runs_of_rows(counts: npt.NDArray[np.integer], most: int) -> list[tuple[int, int]]:
    """First row and end of runs of rows that have at most `most` entries together; a row with more is alone."""
    ends = np.cumsum(counts, dtype=np.int64)
    found, start = list[tuple[int, int]](), 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        found.append((start, end))
        start = end
    return found


def has_repeats(values: npt.NDArray[np.integer], scratch: npt.NDArray[np.int32]) -> bool:
    """Whether a value comes twice; the values are indices into the scratch, whose content does not matter.

    Exact and without a sort: of equal values only the last one finds its own place in the scratch.
    """
    order = np.arange(len(values), dtype=np.int32)
    scratch[values] = order
    return bool(np.count_nonzero(scratch[values] != order))
