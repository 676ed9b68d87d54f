"""What a step's result does to its requests: tokens, stops, rejected drafts, log-probabilities, full blocks.

The second half of the scheduler. Most rows bring one token and nothing else: they are committed all at once, by column,
and only those whose request begins or ends with that token are looked at. Every other row is committed by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core_svc.full_blocks import cache_blocks, cache_blocks_of
from core_svc.outputs import finished_of
from core_svc.plan_builder import ScheduledStep
from core_svc.request import Request, RequestStatus
from core_svc.result_rows import PromptLogprobs, ResultRows, RowResult
from core_svc.slot_table import Slots, SlotTable
from pagewire.columns import Int32Column
from pagewire.engine import Finished, LogprobColumns
from pagewire.plan import StepResult

if TYPE_CHECKING:
    from core_svc.scheduler import Scheduler


def commit_step(scheduler: Scheduler, step: ScheduledStep, result: StepResult) -> None:
    """Commits the rows whose requests still hold their slots; results of others are dropped."""
    now_ns = time.monotonic_ns()
    table, plan = scheduler.table, step.plan
    results = ResultRows(plan, result, table.max_num_seqs)
    scheduler.stats.num_unknown_ids += results.num_unknown
    is_current = step.is_current(table)
    num_committed = plan.num_computed_tokens + plan.num_scheduled_tokens

    is_plain = is_current & results.is_plain & table.is_plain[step.slots] & (plan.num_sampled_tokens == 1)
    plain = is_plain.nonzero()[0]
    _commit_tokens(scheduler, step.slots[plain], results.first_tokens(plain), num_committed[plain], now_ns)
    if len(plain) == len(step.slots):
        return
    for row in (is_current & ~is_plain).nonzero()[0].tolist():
        request: Request = table.requests[step.slots[row]]
        num_sampled = int(plan.num_sampled_tokens[row])
        _commit_request(scheduler, request, results.row(row), num_sampled, int(num_committed[row]), now_ns)


def may_end(table: SlotTable, slots: Slots, token_ids: Int32Column) -> npt.NDArray[np.bool_]:
    """Whether each slot's request ends with this token, which is its last one; `check_stop` says how."""
    num_tokens = table.num_tokens[slots]
    ends: npt.NDArray[np.bool_] = num_tokens >= table.max_num_tokens[slots]
    for stop_ids in table.stop_ids[: table.num_stop_ids]:
        is_stop = stop_ids[slots] == token_ids
        if is_stop.any():
            ends |= is_stop & (num_tokens >= table.min_stop_tokens[slots])
    return ends


def _commit_tokens(
    scheduler: Scheduler, slots: Slots, token_ids: Int32Column, num_committed: Int32Column, now_ns: int
) -> None:
    """Commits one token for each slot, that brings nothing else."""
    if not len(slots):
        return
    table = scheduler.table
    offsets = table.num_tokens[slots]
    table.token_ids[slots, offsets] = token_ids
    table.num_tokens[slots] = offsets + 1
    table.last_token_ns[slots] = now_ns
    is_full = num_committed >= table.next_full_tokens[slots]
    if is_full.any():
        cache_blocks_of(scheduler.kv, table, slots[is_full], num_committed[is_full])
    scheduler.stats.num_generated_tokens += len(slots)
    offsets -= table.num_prompt_tokens[slots]
    ends = may_end(table, slots, token_ids)
    is_turn = table.awaits_first_token[slots] | ends
    for frontend, rows in table.by_frontend(slots):
        own = slots[rows]
        row = scheduler.outputs.add_tokens(frontend, table.request_ids[own], offsets[rows], token_ids[rows])
        turns = is_turn[rows].nonzero()[0]
        columns = (turns, token_ids[rows][turns], ends[rows][turns])
        for place, token_id, is_last in zip(*(column.tolist() for column in columns), strict=True):
            request = table.requests[own[place]]
            _note_start(scheduler, request, row + place, now_ns)
            if is_last:
                _end(scheduler, request, token_id, row + place, now_ns)


def _note_start(scheduler: Scheduler, request: Request, row: int, now_ns: int) -> None:
    """A token was committed by column, with this row of its frontend's outputs: it may be the request's first."""
    note_first_token(request, now_ns)
    if not request.is_started:
        request.is_started = True
        scheduler.outputs.note_started(request.key[0], row, request.num_hit_tokens)


def _end(scheduler: Scheduler, request: Request, token_id: int, row: int, now_ns: int) -> None:
    """Ends a request with the token that was committed by column with this row, if that one does end it."""
    status, stop_token_id = check_stop(request, token_id)
    if status is not None:
        scheduler.end(request, status)
        finished = finished_of(request, stop_token_id=stop_token_id, now_ns=now_ns)
        scheduler.outputs.note_finished(request.key[0], row, finished)


def note_first_token(request: Request, now_ns: int) -> None:
    """Keeps when a running request got its first token."""
    if not request.first_token_ns and request.table is not None:
        request.first_token_ns = now_ns
        request.table.awaits_first_token[request.slot] = False


def _commit_request(
    scheduler: Scheduler, request: Request, row: RowResult, num_sampled: int, num_committed_tokens: int, now_ns: int
) -> None:
    """Commits one row by itself."""
    committed = commit_row(
        request, row, num_sampled=num_sampled, num_committed_tokens=num_committed_tokens, now_ns=now_ns
    )
    scheduler.stats.num_generated_tokens += len(committed.token_ids)
    cache_blocks(scheduler.kv, scheduler.table, request, committed.num_committed_tokens)
    finished: Finished | None = None
    if committed.status is not None:
        scheduler.end(request, committed.status)
        finished = finished_of(
            request,
            stop_token_id=committed.stop_token_id,
            error_code=committed.error_code,
            error_message=committed.error_message,
            now_ns=now_ns,
        )
    is_first = not request.is_started
    request.is_started = True
    if committed.token_ids or is_first or finished is not None or committed.prompt_logprobs is not None:
        scheduler.outputs.add_row(
            request,
            committed.token_ids,
            logprobs=committed.logprobs,
            prompt_logprobs=committed.prompt_logprobs,
            num_cached_tokens=request.num_hit_tokens if is_first else None,
            finished=finished,
        )


@dataclass(slots=True)
class CommittedRow:
    """What a row added to its request; status is set where the request has to end."""

    num_committed_tokens: int
    """Positions whose KV is there and belongs to known tokens."""
    token_ids: Sequence[int] = ()
    logprobs: LogprobColumns | None = None
    prompt_logprobs: PromptLogprobs | None = None
    status: RequestStatus | None = None
    stop_token_id: int | None = None
    error_code: str = ""
    error_message: str = ""


def commit_row(
    request: Request, result: RowResult, *, num_sampled: int, num_committed_tokens: int, now_ns: int
) -> CommittedRow:
    """Applies a row's result to a live request. num_committed_tokens counts the row's own tokens, drafts too."""
    if result.error is not None:
        return _failed(request, result.error)
    if bool(num_sampled) != bool(result.token_ids) or len(result.token_ids) > num_sampled:
        return _failed(request, f"the worker sampled {len(result.token_ids)} tokens where {num_sampled} were planned")
    try:
        prompt_logprobs = _new_prompt_logprobs(request, result.prompt_logprobs)
    except ValueError as error:
        return _failed(request, str(error))
    if not num_sampled:
        return CommittedRow(num_committed_tokens, prompt_logprobs=prompt_logprobs)

    table, slot = request.table, request.slot
    assert table is not None, "only a request that holds its slot is committed"
    num_rejected = num_sampled - len(result.token_ids)
    table.num_computed_tokens[slot] -= num_rejected
    table.num_known_tokens[slot] -= num_rejected
    status, stop_token_id = None, None
    num_kept = 0
    for token_id in result.token_ids:
        table.append(slot, token_id)
        num_kept += 1
        status, stop_token_id = check_stop(request, token_id)
        if status is not None:
            break
    table.last_token_ns[slot] = now_ns
    note_first_token(request, now_ns)
    if result.draft_token_ids and status is None:
        _take_drafts(request, table, result.draft_token_ids)
    return CommittedRow(
        min(num_committed_tokens - num_rejected, request.num_tokens),
        token_ids=result.token_ids[:num_kept],
        logprobs=result.logprobs.rows(0, num_kept) if result.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        status=status,
        stop_token_id=stop_token_id,
    )


def _take_drafts(request: Request, table: SlotTable, draft_token_ids: Sequence[int]) -> None:
    """Keeps drafts for the next step, unless that one is in flight already; from now on steps wait for drafts."""
    slot = request.slot
    if table.placeholders(slot):
        table.set_drafts(slot, 0)
    else:
        # A draft past the last token that may come would be computed for nothing, in blocks the pool need not have.
        num_useful = request.max_num_tokens - request.num_tokens - 1
        request.spec_token_ids = list(draft_token_ids[:num_useful])
        table.set_drafts(slot, len(request.spec_token_ids))


def check_stop(request: Request, token_id: int) -> tuple[RequestStatus | None, int | None]:
    """Whether the request ends with the token just appended, and the stop token id if one of stop_token_ids did it.

    Before min_tokens neither end-of-sequence nor a stop token ends it; the length limits always do.
    """
    if request.num_output_tokens >= request.sampling_params.min_tokens:
        if token_id in request.eos_token_ids:
            return RequestStatus.FINISHED_STOPPED, None
        if token_id in request.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, token_id
    if request.num_tokens >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED, None
    return None, None


def _new_prompt_logprobs(request: Request, found: PromptLogprobs | None) -> PromptLogprobs | None:
    """The part that was not delivered yet: recomputed chunks bring positions again.

    Raises ValueError where positions are missing in between.
    """
    if found is None or request.sampling_params.prompt_logprobs is None:
        return None
    start, columns = found
    expected = request.next_prompt_logprob
    if start > expected:
        raise ValueError(f"prompt log-probabilities start at position {start}, expected {expected}")
    fresh = columns.rows(expected - start)
    if not len(fresh):
        return None
    request.next_prompt_logprob += len(fresh)
    return expected, fresh


def _failed(request: Request, message: str) -> CommittedRow:
    return CommittedRow(
        num_committed_tokens=0,
        status=RequestStatus.FINISHED_ERROR,
        error_code="INTERNAL",
        error_message=message,
    )
