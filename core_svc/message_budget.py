"""Refuses requests whose log-probabilities of one step could not travel in one message, which would harm all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.engine import EngineRequest
from pagewire.errors import InvalidArgumentError, violation

BYTES_PER_CANDIDATE = 8
"""A token id and a log-probability."""


@dataclass(frozen=True, slots=True)
class MessageBudget:
    """What the messages between worker, core and frontend have room for."""

    max_message_bytes: int
    max_num_batched_tokens: int
    vocab_size: int

    def check(self, requests: Sequence[EngineRequest]) -> None:
        """Raises InvalidArgumentError for prompt log-probabilities that may take more than half of a message."""
        room = self.max_message_bytes // 2 // BYTES_PER_CANDIDATE
        found = []
        for i, request in enumerate(requests):
            count = request.sampling_params.prompt_logprobs
            if count is None:
                continue
            num_positions = min(len(request.prompt_token_ids), self.max_num_batched_tokens)
            num_candidates = (self.vocab_size if count < 0 else count) + 1
            if num_positions * num_candidates > room:
                limit = (
                    f"must be at most {max(room // num_positions - 1, 0)} for a prompt of "
                    f"{len(request.prompt_token_ids)} tokens: a step's log-probabilities travel in one message of at "
                    f"most {self.max_message_bytes} bytes"
                )
                found.append(violation(f"requests[{i}].sampling_params.prompt_logprobs", count, limit))
        if found:
            raise InvalidArgumentError(found)
