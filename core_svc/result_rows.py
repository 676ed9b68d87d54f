"""Puts the columns of a StepResult into the order of its plan's rows; the worker's own order means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.columns import Int32Column
from pagewire.engine import LogprobColumns
from pagewire.plan import StepPlan, StepResult

PromptLogprobs = tuple[int, LogprobColumns]
"""First prompt position and the columns from there."""


@dataclass(slots=True)
class RowResult:
    """A worker's result for one row."""

    token_ids: Sequence[int] = ()
    draft_token_ids: Sequence[int] = ()
    logprobs: LogprobColumns | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


def _starts_of(counts: Int32Column) -> Int32Column:
    """Where each row's part of a column begins, in which the rows' parts follow each other; mostly one token each."""
    if (counts == 1).all():
        return np.arange(len(counts), dtype=np.int32)
    return np.cumsum(counts, dtype=np.int32) - counts


class ResultRows:
    """A step's result by row of the plan."""

    def __init__(self, plan: StepPlan, result: StepResult, num_slots: int) -> None:
        self._plan, self._result, self._num_slots = plan, result, num_slots
        rows = None if result.slots.tobytes() == plan.slots.tobytes() else self._rows_of(result.slots)
        self._starts = self._spread(rows, _starts_of(result.num_tokens))
        self.num_tokens = self._spread(rows, result.num_tokens)
        self.is_plain = self.num_tokens == 1
        """By row: one token, and nothing else."""
        self.num_unknown = self._note_extras(set() if rows is None else set(result.slots[rows < 0].tolist()))
        self._num_drafts = None
        if len(result.draft_token_ids):
            self._num_drafts = self._spread(rows, result.num_draft_tokens)
            self._draft_starts = self._spread(rows, _starts_of(result.num_draft_tokens))
            self.is_plain &= self._num_drafts == 0

    def first_tokens(self, rows: npt.NDArray[np.intp]) -> Int32Column:
        """The first token of each of the rows, which must have one."""
        tokens: Int32Column = self._result.token_ids[self._starts[rows]]
        return tokens

    def row(self, row: int) -> RowResult:
        """Everything about one row."""
        result, slot = self._result, int(self._plan.slots[row])
        start, found = int(self._starts[row]), RowResult()
        found.token_ids = result.token_ids[start : start + int(self.num_tokens[row])].tolist()
        if self._num_drafts is not None:
            start = int(self._draft_starts[row])
            found.draft_token_ids = result.draft_token_ids[start : start + int(self._num_drafts[row])].tolist()
        found.logprobs = result.logprobs.get(slot)
        found.prompt_logprobs = result.prompt_logprobs.get(slot)
        found.error = result.errors.get(slot)
        return found

    def _rows_of(self, slots: Int32Column) -> Int32Column:
        """Rows of slots; -1 for a slot that the plan has no row of."""
        row_of_slot = np.full(self._num_slots, -1, np.int32)
        row_of_slot[self._plan.slots] = np.arange(len(self._plan.slots), dtype=np.int32)
        is_slot = (slots >= 0) & (slots < self._num_slots)
        rows: Int32Column = np.where(is_slot, row_of_slot[np.where(is_slot, slots, 0)], -1)
        return rows

    def _spread(self, rows: Int32Column | None, values: Int32Column) -> Int32Column:
        """Values by row of the plan; None says that they are that already."""
        if rows is None:
            return values
        spread = np.zeros(len(self._plan.slots), np.int32)
        is_known = rows >= 0
        spread[rows[is_known]] = values[is_known]
        return spread

    def _note_extras(self, unknown: set[int]) -> int:
        """Rows with more than tokens are not plain; returns how many slots the plan does not know."""
        for extras in (self._result.logprobs, self._result.prompt_logprobs, self._result.errors):
            for slot in extras:
                row = int(self._rows_of(np.array([slot], np.int32))[0])
                if row < 0:
                    unknown.add(slot)
                else:
                    self.is_plain[row] = False
        return len(unknown)
