"""Collects what a step produces into one StepOutputs per frontend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core_svc.request import Request
from pagewire.engine import AbortReason, Finished, LogprobColumns, StepOutputs


class _Rows:
    """The rows of one frontend, as lists that become columns."""

    __slots__ = (
        "finished",
        "logprobs",
        "num_tokens",
        "offsets",
        "prompt_logprobs",
        "request_ids",
        "started",
        "token_ids",
    )

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.offsets: list[int] = []
        self.num_tokens: list[int] = []
        self.token_ids: list[int] = []
        self.finished: list[Finished] = []
        self.logprobs: dict[int, LogprobColumns] = {}
        self.prompt_logprobs: dict[int, tuple[int, LogprobColumns]] = {}
        self.started: dict[int, int] = {}

    def to_step_outputs(self, step: int) -> StepOutputs:
        return StepOutputs(
            step=step,
            request_ids=np.array(self.request_ids, np.uint64),
            offsets=np.array(self.offsets, np.int32),
            num_tokens=np.array(self.num_tokens, np.int32),
            token_ids=np.array(self.token_ids, np.int32),
            finished=self.finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            started=self.started,
        )


class OutputCollector:
    """Outputs since the last `take`. A request has at most one row; its finish goes into that row."""

    def __init__(self) -> None:
        self._by_frontend: dict[str, _Rows] = {}

    def add_row(
        self,
        request: Request,
        token_ids: Sequence[int] = (),
        *,
        logprobs: LogprobColumns | None = None,
        prompt_logprobs: tuple[int, LogprobColumns] | None = None,
        num_cached_tokens: int | None = None,
        finished: Finished | None = None,
    ) -> None:
        """Adds a request's outputs; token_ids are part of it already, num_cached_tokens says that it started."""
        frontend_incarnation, request_id = request.key
        rows = self._by_frontend.get(frontend_incarnation)
        if rows is None:
            rows = self._by_frontend[frontend_incarnation] = _Rows()
        row = len(rows.request_ids)
        rows.request_ids.append(request_id)
        rows.offsets.append(request.num_output_tokens - len(token_ids))
        rows.num_tokens.append(len(token_ids))
        rows.token_ids.extend(token_ids)
        if logprobs is not None:
            rows.logprobs[row] = logprobs
        if prompt_logprobs is not None:
            rows.prompt_logprobs[row] = prompt_logprobs
        if num_cached_tokens is not None:
            rows.started[row] = num_cached_tokens
        if finished is not None:
            finished.row = row
            rows.finished.append(finished)

    def drop(self, frontend_incarnation: str) -> None:
        """Forgets what was collected for a frontend that is gone."""
        self._by_frontend.pop(frontend_incarnation, None)

    def take(self, step: int) -> list[tuple[str, StepOutputs]]:
        """Hands over everything collected, by frontend."""
        taken, self._by_frontend = self._by_frontend, {}
        return [(frontend, rows.to_step_outputs(step)) for frontend, rows in taken.items()]


def finished_of(
    request: Request,
    *,
    stop_token_id: int | None = None,
    abort_reason: AbortReason = AbortReason.UNSPECIFIED,
    error_code: str = "",
    error_message: str = "",
    now_ns: int,
) -> Finished:
    """How a request that just got its terminal status ended, and where its time went."""
    started_ns = request.scheduled_ns or now_ns
    first_ns = request.first_token_ns or now_ns
    last_ns = request.last_token_ns or first_ns
    return Finished(
        row=0,
        reason=request.status.finish_reason,
        stop_token_id=stop_token_id,
        abort_reason=abort_reason,
        error_code=error_code,
        error_message=error_message,
        num_preemptions=request.num_preemptions,
        queue_us=(started_ns - request.queued_ns) // 1000,
        prefill_us=(first_ns - started_ns) // 1000 if request.scheduled_ns else 0,
        decode_us=(last_ns - first_ns) // 1000,
    )
