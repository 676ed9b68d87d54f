"""What a row's result does to its request: tokens, stops, rejected drafts, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core_svc.request import Request, RequestStatus
from core_svc.result_rows import PromptLogprobs, RowResult
from pagewire.engine import LogprobColumns


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

    num_rejected = num_sampled - len(result.token_ids)
    request.num_computed_tokens -= num_rejected
    status, stop_token_id = None, None
    num_kept = 0
    for token_id in result.token_ids:
        request.append_token(token_id)
        num_kept += 1
        status, stop_token_id = check_stop(request, token_id)
        if status is not None:
            break
    request.last_token_ns = now_ns
    if not request.first_token_ns:
        request.first_token_ns = now_ns
    if result.draft_token_ids and status is None:
        # A draft past the last token that may come would be computed for nothing, in blocks the pool need not have.
        num_useful = request.max_num_tokens - request.num_tokens - 1
        request.spec_token_ids = list(result.draft_token_ids[:num_useful])
    return CommittedRow(
        min(num_committed_tokens - num_rejected, request.num_tokens),
        token_ids=result.token_ids[:num_kept],
        logprobs=result.logprobs.rows(0, num_kept) if result.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        status=status,
        stop_token_id=stop_token_id,
    )


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
