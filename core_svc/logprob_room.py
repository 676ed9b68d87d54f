"""Bounds the log-probabilities of one step: nobody's may keep the answers of others from travelling."""

from __future__ import annotations

from bisect import bisect_right

from core_svc.request import Request

BYTES_PER_CANDIDATE = 8
"""A token id and a log-probability."""


class LogprobRoom:
    """What is left of one step's candidates. Rows that ask for none take nothing and are never cut."""

    def __init__(self, max_candidates: int) -> None:
        self._left = max_candidates

    def take(self, request: Request, num_known: int, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Most tokens, up to num_new_tokens, from position num_computed_tokens on whose candidates have room.

        Their room is taken. num_known counts the request's tokens and those that steps in flight will append.
        """
        if not request.logprob_width and not request.prompt_logprob_width:
            return num_new_tokens

        def candidates(count: int) -> int:
            return num_candidates(request, num_known, num_computed_tokens, count)

        num_fitting = bisect_right(range(num_new_tokens + 1), self._left, key=candidates) - 1
        self._left -= candidates(num_fitting)
        return num_fitting


def num_candidates(request: Request, num_known: int, num_computed_tokens: int, num_new_tokens: int) -> int:
    """Candidates that a row brings: the state at position p tells about p + 1, and the last one is sampled from."""
    end = num_computed_tokens + num_new_tokens
    first = max(request.next_prompt_logprob, num_computed_tokens + 1)
    num_prompt = max(0, min(end + 1, request.num_prompt_tokens) - first)
    num_sampled = max(0, end - num_known + 1)
    return num_prompt * request.prompt_logprob_width + num_sampled * request.logprob_width
