"""Turns scheduled rows into the columns of a StepPlan: running requests all at once, admitted ones after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core_svc.request import Request
from core_svc.slot_table import Slots, SlotTable
from pagewire.columns import EMPTY_INT32, Int32Column
from pagewire.plan import NewRequest, StepPlan


@dataclass(slots=True)
class ScheduledStep:
    """A plan with the requests behind its rows: what `update` needs to commit the plan's result.

    It is handed from schedule to execute to update, so that a later step may be scheduled before this one is committed.
    """

    number: int
    """Counts the engine's steps; unlike plan.step it never starts anew."""
    plan: StepPlan
    slots: Slots
    """The plan's."""
    requests: npt.NDArray[np.object_]
    """In row order."""
    planned_ns: int = 0
    """When its planning began; monotonic, as scheduled_ns."""
    scheduled_ns: int = 0
    """When its planning ended."""

    def is_current(self, table: SlotTable) -> npt.NDArray[np.bool_]:
        """By row, whether its request still holds the slot that it had in this step."""
        return table.admitted_step[self.slots] <= self.number


@dataclass(slots=True)
class Rows:
    """Rows that are scheduled, as columns: what each computes, and the blocks that it gets for that."""

    slots: Slots
    num_scheduled_tokens: Int32Column
    num_computed_tokens: Int32Column
    num_sampled_tokens: Int32Column
    num_draft_tokens: Int32Column
    num_new_blocks: Int32Column

    @classmethod
    def of(
        cls,
        slots: Slots,
        num_new: Int32Column,
        num_computed: Int32Column,
        num_known: Int32Column,
        blocks: Int32Column,
    ) -> Rows:
        """Rows that compute num_new tokens from num_computed on; what lies beyond num_known tokens are drafts.

        A row that reaches what is known samples there, and after each draft.
        """
        num_beyond = num_computed + num_new - num_known
        return cls(slots, num_new, num_computed, np.maximum(num_beyond + 1, 0), np.maximum(num_beyond, 0), blocks)

    def advance(self, table: SlotTable, num_known: Int32Column) -> int:
        """Moves the rows' requests on as if their step had run; returns how many tokens they compute."""
        table.num_computed_tokens[self.slots] = self.num_computed_tokens + self.num_scheduled_tokens
        table.num_known_tokens[self.slots] = num_known + self.num_sampled_tokens
        return int(self.num_scheduled_tokens.sum())


class PlanBuilder:
    """One step's plan while it grows."""

    def __init__(self) -> None:
        self._parts: list[Rows] = []
        self._block_ids: list[int] = []
        self._drafts: list[int] = []
        self._new_requests: list[NewRequest] = []
        self.num_rows = 0

    def add(self, rows: Rows, block_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Adds rows of requests that hold their slots already."""
        self._parts.append(rows)
        self._block_ids.extend(block_ids)
        self._drafts.extend(drafts)
        self.num_rows += len(rows.slots)

    def add_new(self, rows: Rows, block_ids: Sequence[int], requests: Sequence[Request]) -> None:
        """Adds rows of requests that take their slots in this step."""
        self._new_requests.extend(request.to_new_request() for request in requests)
        self.add(rows, block_ids)

    def build(
        self, number: int, epoch: int, step: int, released_slots: Sequence[int], requests: npt.NDArray[np.object_]
    ) -> ScheduledStep:
        """The finished plan; `requests` are those of all slots."""
        rows = _joined(self._parts)
        plan = StepPlan(
            epoch=epoch,
            step=step,
            slots=rows.slots.astype(np.int32),
            num_scheduled_tokens=rows.num_scheduled_tokens,
            num_computed_tokens=rows.num_computed_tokens,
            num_sampled_tokens=rows.num_sampled_tokens,
            num_new_blocks=rows.num_new_blocks,
            new_block_ids=_column(self._block_ids),
            released_slots=_column(released_slots),
            new_requests=self._new_requests,
            num_draft_tokens=rows.num_draft_tokens if self._drafts else EMPTY_INT32,
            draft_token_ids=_column(self._drafts),
        )
        return ScheduledStep(number, plan, rows.slots, requests.take(rows.slots))


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Rows(np.empty(0, np.intp), *[EMPTY_INT32] * 5)
    names = Rows.__dataclass_fields__
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _column(values: Sequence[int]) -> Int32Column:
    return np.array(values, np.int32) if values else EMPTY_INT32
