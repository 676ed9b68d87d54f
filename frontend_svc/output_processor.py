"""Core outputs in, caller outputs and aborts out: the only loop over the rows of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.request_state import RequestState
from pagewire.engine import AbortReason, CoreStats, Finished, FinishReason, LogprobColumns, StepOutputs
from pagewire.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from pagewire.runtime.log_fields import fields

log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS_BEHIND = 4096
Aborts = dict[AbortReason, list[int]]
"""Requests that the core shall end, by reason."""

_ERRORS: dict[str, type[PagewireError]] = {
    error.code: error
    for error in (
        AbortedError,
        AlreadyExistsError,
        DeadlineExceededError,
        FailedPreconditionError,
        InternalError,
        NotFoundError,
        ResourceExhaustedError,
        UnavailableError,
        UnimplementedError,
    )
}


def _error_of(finished: Finished) -> PagewireError | None:
    """The error that a core's finish means for the caller; None where it is an output like any other."""
    if finished.reason is FinishReason.ERROR:
        return _ERRORS.get(finished.error_code, InternalError)(
            finished.error_message or "the request failed in the core"
        )
    if finished.reason is FinishReason.DEADLINE:
        return DeadlineExceededError("the deadline passed before the output was complete")
    if finished.reason is FinishReason.ABORT:
        if finished.abort_reason in (AbortReason.SHUTDOWN, AbortReason.LEASE_EXPIRED):
            return UnavailableError(f"the core gave the request up: {finished.abort_reason.name}", retry_after_s=1.0)
        if finished.abort_reason is AbortReason.DEADLINE:
            return DeadlineExceededError("the deadline passed before the output was complete")
    return None


class OutputProcessor:
    """All living requests of one frontend at one core.

    Args:
        max_tokens_behind: tokens that may pile up behind a message that the caller has not taken; a caller that is
            further behind is cut off with RESOURCE_EXHAUSTED.
    """

    def __init__(self, max_tokens_behind: int = DEFAULT_MAX_TOKENS_BEHIND) -> None:
        self._states: dict[int, tuple[RequestState, ParentRequest]] = {}
        self._max_tokens_behind = max_tokens_behind
        self.num_unknown_ids = 0
        """Rows for requests that are not (or no longer) here."""
        self.num_aborts: dict[AbortReason, int] = {}
        """Aborts sent, by reason."""
        self.num_failed = 0
        """Requests that ended with an error."""
        self.core_stats: CoreStats | None = None
        """The last numbers that the core sent."""

    def __len__(self) -> int:
        return len(self._states)

    def add(self, parent: ParentRequest) -> None:
        """Registers a request with its children."""
        for child in parent.children:
            self._states[child.request_id] = (child, parent)

    def process_outputs(self, outputs: StepOutputs) -> Aborts:
        """Feeds one message of a core; returns what the core shall end now."""
        aborts: Aborts = {}
        if outputs.stats is not None:
            self.core_stats = outputs.stats
        finished = {f.row: f for f in outputs.finished}
        is_plain = not (finished or outputs.started or outputs.logprobs or outputs.prompt_logprobs)
        for row, request_id, offset, token_ids in _rows(outputs):
            found = self._states.get(request_id)
            if found is None:
                self.num_unknown_ids += 1
                continue
            state, parent = found
            try:
                if is_plain and offset == state.num_received:
                    self._process_row(state, parent, token_ids, None, None, aborts)
                    continue
                if row in outputs.started:
                    parent.num_cached_tokens = max(parent.num_cached_tokens, outputs.started[row])
                self._check_prompt_logprobs(parent, outputs.prompt_logprobs.get(row))
                row_tokens, columns = _without_duplicates(state, offset, token_ids, outputs.logprobs.get(row))
                self._process_row(state, parent, row_tokens, columns, finished.get(row), aborts)
            except PagewireError as error:
                self._fail(parent, error, AbortReason.SIBLING_FAILED, aborts)
            except Exception:
                log.exception("an output cannot be processed", extra=fields(request_id=parent.external_request_id))
                self._fail(parent, InternalError("the output cannot be processed"), AbortReason.SIBLING_FAILED, aborts)
        self._count(aborts)
        return aborts

    def _process_row(
        self,
        state: RequestState,
        parent: ParentRequest,
        token_ids: list[int],
        columns: LogprobColumns | None,
        finished: Finished | None,
        aborts: Aborts,
    ) -> None:
        has_news = state.add(token_ids, columns, finished)
        if not parent.first_token_ns and token_ids:
            parent.first_token_ns = time.monotonic_ns()
        if has_news and state.finish_reason is None:
            parent.mark(state, len(token_ids))
            if parent.num_behind > self._max_tokens_behind:
                self._cut_off(parent, aborts)
            return
        ended_here = state.is_finished and (finished is None or state.finish_reason is not finished.reason)
        error = None if finished is None or ended_here else _error_of(finished)
        if state.is_finished:
            del self._states[state.request_id]
        if error is not None:
            self._fail(parent, error, AbortReason.SIBLING_FAILED, aborts)
            return
        if state.is_finished and finished is None:
            aborts.setdefault(AbortReason.STOP_STRING, []).append(state.request_id)
        if not has_news:
            return
        parent.mark(state, len(token_ids))
        if parent.num_behind > self._max_tokens_behind and not parent.is_finished:
            self._cut_off(parent, aborts)

    def _cut_off(self, parent: ParentRequest, aborts: Aborts) -> None:
        error = ResourceExhaustedError(
            f"the caller is {parent.num_behind} tokens behind, more than the limit of {self._max_tokens_behind}",
            reason="SLOW_CONSUMER",
        )
        self._fail(parent, error, AbortReason.SLOW_CONSUMER, aborts)

    def _check_prompt_logprobs(self, parent: ParentRequest, found: tuple[int, LogprobColumns] | None) -> None:
        if found is not None and not parent.add_prompt_logprobs(*found):
            raise InternalError(f"log-probabilities of prompt positions before {found[0]} were lost")

    def _fail(self, parent: ParentRequest, error: PagewireError, reason: AbortReason, aborts: Aborts) -> None:
        ids = self._remove(parent)
        parent.fail(error)
        self.num_failed += 1
        if ids:
            aborts.setdefault(reason, []).extend(ids)

    def _remove(self, parent: ParentRequest) -> list[int]:
        """Forgets a request; returns the ids of its children that still lived."""
        return [c.request_id for c in parent.children if self._states.pop(c.request_id, None) is not None]

    def _count(self, aborts: Aborts) -> None:
        for reason, ids in aborts.items():
            self.num_aborts[reason] = self.num_aborts.get(reason, 0) + len(ids)

    def abort(self, parent: ParentRequest, reason: AbortReason) -> Aborts:
        """Ends a request with finish reason ABORT; its waiter gets the last output. Nothing to do for an ended one."""
        ids = self._remove(parent)
        parent.finish_children(FinishReason.ABORT)
        aborts = {reason: ids} if ids else {}
        self._count(aborts)
        return aborts

    def fail(self, parent: ParentRequest, error: PagewireError, reason: AbortReason) -> Aborts:
        """Ends a request with an error."""
        aborts: Aborts = {}
        self._fail(parent, error, reason, aborts)
        self._count(aborts)
        return aborts

    def forget(self, parent: ParentRequest, reason: AbortReason) -> Aborts:
        """Lets a request go on elsewhere; what comes of it here is dropped."""
        ids = self._remove(parent)
        return {reason: ids} if ids else {}

    def parents(self) -> list[ParentRequest]:
        """The living requests."""
        return list({id(parent): parent for _, parent in self._states.values()}.values())


def _rows(outputs: StepOutputs) -> Iterator[tuple[int, int, int, list[int]]]:
    """Row, request id, offset and tokens of each row. One conversion per column, not per element."""
    token_ids: list[int] = outputs.token_ids.tolist()
    start = 0
    columns = zip(outputs.request_ids.tolist(), outputs.offsets.tolist(), outputs.num_tokens.tolist(), strict=True)
    for row, (request_id, offset, num_tokens) in enumerate(columns):
        stop = start + num_tokens
        yield row, request_id, offset, token_ids[start:stop]
        start = stop


def _without_duplicates(
    state: RequestState, offset: int, token_ids: Sequence[int], columns: LogprobColumns | None
) -> tuple[list[int], LogprobColumns | None]:
    """Drops tokens that came before (a core resends after a reconnect). Raises InternalError for a gap."""
    num_known = state.num_received - offset
    if num_known == 0 or not token_ids:
        return list(token_ids), columns
    if num_known < 0:
        raise InternalError(f"tokens {state.num_received} to {offset - 1} of the output were lost")
    return list(token_ids[num_known:]), None if columns is None else columns.rows(num_known)
