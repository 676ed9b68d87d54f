"""What may watch a worker's steps (metrics, traces), and what it is told: each plan once it was run, or failed."""

from __future__ import annotations

from typing import Protocol

from pagewire.plan import StepPlan, StepResult


class ExecuteObserver(Protocol):
    """Watches steps on the event loop; must neither block nor raise."""

    def executed(
        self, plan: StepPlan, result: StepResult | None, error: BaseException | None, started_ns: int, ended_ns: int
    ) -> None:
        """A plan's turn came at started_ns and its result was handed out at ended_ns (monotonic); one of both is set.

        A plan whose stream ended before its turn came is not told of.
        """
        ...
