"""Collects what a step produces into one StepOutputs per frontend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from core_svc.request import Request
from pagewire.columns import Int32Column, UInt64Column
from pagewire.engine import AbortReason, Finished, LogprobColumns, StepOutputs

T = TypeVar("T", bound=np.generic)


class _Rows:
    """The rows of one frontend, as parts that become columns. All lists and dicts are by row."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.parts: list[tuple[UInt64Column, Int32Column, Int32Column, Int32Column]] = []
        """Request ids, offsets, numbers of tokens, tokens."""
        self.finished: list[Finished] = []
        self.logprobs: dict[int, LogprobColumns] = {}
        self.prompt_logprobs: dict[int, tuple[int, LogprobColumns]] = {}
        self.started: dict[int, int] = {}

    def add(self, ids: UInt64Column, offsets: Int32Column, num_tokens: Int32Column, token_ids: Int32Column) -> None:
        self.parts.append((ids, offsets, num_tokens, token_ids))
        self.num_rows += len(ids)

    def to_step_outputs(self, step: int) -> StepOutputs:
        ids, offsets, num_tokens, token_ids = zip(*self.parts, strict=True)
        return StepOutputs(
            step,
            _joined(ids),
            _joined(offsets),
            _joined(num_tokens),
            _joined(token_ids),
            finished=self.finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            started=self.started,
        )


def _joined(parts: Sequence[npt.NDArray[T]]) -> npt.NDArray[T]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class OutputCollector:
    """Outputs since the last `take`. A request has at most one row; its finish goes into that row."""

    def __init__(self) -> None:
        self._by_frontend: dict[str, _Rows] = {}
        self._ones: Int32Column = np.ones(0, np.int32)

    def add_tokens(
        self, frontend_incarnation: str, request_ids: UInt64Column, offsets: Int32Column, token_ids: Int32Column
    ) -> int:
        """Adds a row with one token for each of a frontend's requests; returns the first row."""
        rows = self._rows_of(frontend_incarnation)
        first = rows.num_rows
        rows.add(request_ids, offsets, self._one_each(len(request_ids)), token_ids)
        return first

    def note_started(self, frontend_incarnation: str, row: int, num_cached_tokens: int) -> None:
        """The request of a row that was added started with so many tokens from the prefix cache."""
        self._by_frontend[frontend_incarnation].started[row] = num_cached_tokens

    def note_finished(self, frontend_incarnation: str, row: int, finished: Finished) -> None:
        """The request of a row that was added has ended."""
        finished.row = row
        self._by_frontend[frontend_incarnation].finished.append(finished)

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
        rows = self._rows_of(frontend_incarnation)
        row = rows.num_rows
        offset = request.num_output_tokens - len(token_ids)
        rows.add(
            np.array([request_id], np.uint64),
            np.array([offset], np.int32),
            np.array([len(token_ids)], np.int32),
            np.array(token_ids, np.int32),
        )
        if logprobs is not None:
            rows.logprobs[row] = logprobs
        if prompt_logprobs is not None:
            rows.prompt_logprobs[row] = prompt_logprobs
        if num_cached_tokens is not None:
            self.note_started(frontend_incarnation, row, num_cached_tokens)
        if finished is not None:
            self.note_finished(frontend_incarnation, row, finished)

    def drop(self, frontend_incarnation: str) -> None:
        """Forgets what was collected for a frontend that is gone."""
        self._by_frontend.pop(frontend_incarnation, None)

    def take(self, step: int) -> list[tuple[str, StepOutputs]]:
        """Hands over everything collected, by frontend."""
        taken, self._by_frontend = self._by_frontend, {}
        return [(frontend, rows.to_step_outputs(step)) for frontend, rows in taken.items()]

    def _one_each(self, num_rows: int) -> Int32Column:
        """A one for each row; read-only, for it is the same memory in every step."""
        if num_rows > len(self._ones):
            self._ones = np.ones(2 * num_rows, np.int32)
            self._ones.flags.writeable = False
        return self._ones[:num_rows]

    def _rows_of(self, frontend_incarnation: str) -> _Rows:
        rows = self._by_frontend.get(frontend_incarnation)
        if rows is None:
            rows = self._by_frontend[frontend_incarnation] = _Rows()
        return rows


def finished_of(
    request: Request,
    *,
    stop_token_id: int | None = None,
    abort_reason: AbortReason = AbortReason.UNSPECIFIED,
    error_code: str = "",
    error_message: str = "",
    now_ns: int,
) -> Finished:
    """How a request that just got its terminal status ended, and where its time went; noted in the request too."""
    started_ns = request.scheduled_ns or now_ns
    first_ns = request.first_token_ns or now_ns
    last_ns = request.last_token_ns or first_ns
    request.finished = Finished(
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
    return request.finished
