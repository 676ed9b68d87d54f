"""Turns scheduled requests, row by row, into the columns of a StepPlan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core_svc.request import Request
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
    requests: list[Request]
    """In row order."""

    def is_current(self, request: Request) -> bool:
        """Whether the request still holds the slot that it had in this step."""
        return request.slot >= 0 and request.admitted_step <= self.number


class PlanBuilder:
    """Rows of one step. All lists grow with rows, blocks and drafts; nothing is per token."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._slots: list[int] = []
        self._num_scheduled: list[int] = []
        self._num_computed: list[int] = []
        self._num_sampled: list[int] = []
        self._num_new_blocks: list[int] = []
        self._new_block_ids: list[int] = []
        self._num_drafts: list[int] = []
        self._drafts: list[int] = []
        self._new_requests: list[NewRequest] = []

    def add(self, request: Request, num_new_tokens: int, block_ids: list[int]) -> None:
        """Adds a row that computes num_new_tokens from request.num_computed_tokens on; drafts are its last tokens."""
        num_beyond = request.num_computed_tokens + num_new_tokens - request.num_tokens
        num_drafts = max(0, num_beyond)
        self.requests.append(request)
        self._slots.append(request.slot)
        self._num_scheduled.append(num_new_tokens)
        self._num_computed.append(request.num_computed_tokens)
        self._num_sampled.append(num_beyond + 1 if num_beyond >= 0 else 0)
        self._num_new_blocks.append(len(block_ids))
        self._num_drafts.append(num_drafts)
        if block_ids:
            self._new_block_ids.extend(block_ids)
        if num_drafts:
            self._drafts.extend(request.spec_token_ids[:num_drafts])

    def add_new(self, request: Request, num_new_tokens: int, block_ids: list[int]) -> None:
        """Adds a row of a request that takes its slot in this step."""
        self._new_requests.append(request.to_new_request())
        self.add(request, num_new_tokens, block_ids)

    def build(self, number: int, epoch: int, step: int, released_slots: list[int]) -> ScheduledStep:
        """The finished plan."""
        plan = StepPlan(
            epoch=epoch,
            step=step,
            slots=_column(self._slots),
            num_scheduled_tokens=_column(self._num_scheduled),
            num_computed_tokens=_column(self._num_computed),
            num_sampled_tokens=_column(self._num_sampled),
            num_new_blocks=_column(self._num_new_blocks),
            new_block_ids=_column(self._new_block_ids),
            released_slots=_column(released_slots),
            new_requests=self._new_requests,
            num_draft_tokens=_column(self._num_drafts) if self._drafts else EMPTY_INT32,
            draft_token_ids=_column(self._drafts),
        )
        return ScheduledStep(number, plan, self.requests)


def _column(values: list[int]) -> Int32Column:
    return np.array(values, np.int32) if values else EMPTY_INT32
