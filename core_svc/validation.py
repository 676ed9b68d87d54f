"""What a core accepts: one bad request must never reach a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core_svc.config import EngineConfig
from pagewire.columns import Int32Column
from pagewire.engine import EngineRequest, ModelInfo
from pagewire.errors import FieldViolation, violation


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request: the model and the KV pool."""

    vocab_size: int
    max_model_len: int
    """Of the model."""
    max_kv_tokens: int
    """Positions for which the whole pool has room."""
    max_logprob_candidates: int
    """Of one step, see EngineConfig."""

    @property
    def max_num_tokens(self) -> int:
        """Longest sequence, prompt and output. The last token's own KV is never computed, so one more than the pool."""
        return min(self.max_model_len, self.max_kv_tokens + 1)


def limits_of(model: ModelInfo, num_blocks: int, config: EngineConfig) -> Limits:
    """The limits that a model and a pool of num_blocks (the null block counted) set."""
    max_kv_tokens = (num_blocks - 1) * config.block_size
    return Limits(model.vocab_size, model.max_model_len, max_kv_tokens, config.max_logprob_candidates)


def request_violations(request: EngineRequest, limits: Limits, path: str) -> list[FieldViolation]:
    """Everything that is wrong with a request; empty if all is well."""
    found = _token_violations(f"{path}.prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    found += _token_violations(f"{path}.output_token_ids", request.output_token_ids, limits.vocab_size)
    found += _token_violations(f"{path}.eos_token_ids", request.eos_token_ids, limits.vocab_size)
    if not 0 <= request.request_id < 2**64:
        found.append(violation(f"{path}.request_id", request.request_id, "must be an unsigned 64-bit integer"))
    if request.remaining_ms is not None and request.remaining_ms < 0:
        found.append(violation(f"{path}.remaining_ms", request.remaining_ms, "must not be negative"))
    found += request.sampling_params.violations(limits.vocab_size, f"{path}.sampling_params")
    found += _logprob_violations(request, limits, path)
    return found + _resolution_violations(request, path) + _length_violations(request, limits, path)


def _token_violations(path: str, token_ids: Int32Column | Sequence[int], vocab_size: int) -> list[FieldViolation]:
    if not len(token_ids):
        return []
    column = np.asarray(token_ids)
    if column.min() >= 0 and column.max() < vocab_size:
        return []
    first = int(((column < 0) | (column >= vocab_size)).argmax())
    return [violation(f"{path}[{first}]", int(column[first]), f"token ids must be in [0, {vocab_size})")]


def _logprob_violations(request: EngineRequest, limits: Limits, path: str) -> list[FieldViolation]:
    """What the scheduler could not spread over steps: one position alone must have room in a message."""
    params, most = request.sampling_params, limits.max_logprob_candidates
    widths = {
        "logprobs": (params.logprobs, params.logprob_width(limits.vocab_size)),
        "prompt_logprobs": (params.prompt_logprobs, params.prompt_logprob_width(limits.vocab_size)),
    }
    return [
        violation(f"{path}.sampling_params.{name}", value, f"must give at most {most} candidates per token")
        for name, (value, width) in widths.items()
        if width > most
    ]


def _resolution_violations(request: EngineRequest, path: str) -> list[FieldViolation]:
    params = request.sampling_params
    found = []
    if params.n != 1:
        found.append(violation(f"{path}.sampling_params.n", params.n, "must be 1: each completion is a request"))
    if params.seed is None and not params.is_greedy:
        found.append(violation(f"{path}.sampling_params.seed", None, "must be set unless temperature is 0"))
    return found


def _length_violations(request: EngineRequest, limits: Limits, path: str) -> list[FieldViolation]:
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    max_tokens = request.sampling_params.max_tokens
    pool = f"the KV pool has room for {limits.max_kv_tokens} tokens"
    if num_prompt == 0:
        return [violation(f"{path}.prompt_token_ids", "0 tokens", "must not be empty")]
    if num_prompt >= limits.max_num_tokens:
        reason = pool if limits.max_kv_tokens + 1 < limits.max_model_len else "the model's longest sequence, less one"
        limit = f"must have at most {limits.max_num_tokens - 1} tokens: {reason}"
        return [violation(f"{path}.prompt_token_ids", f"{num_prompt} tokens", limit)]
    if max_tokens is not None:
        total = min(num_prompt + max_tokens, limits.max_model_len)
        if total > limits.max_num_tokens:
            limit = f"must be at most {limits.max_num_tokens - num_prompt} after {num_prompt} prompt tokens: {pool}"
            return [violation(f"{path}.sampling_params.max_tokens", max_tokens, limit)]
    room = limits.max_num_tokens - num_prompt if max_tokens is None else max_tokens
    if num_output >= min(room, limits.max_num_tokens - num_prompt):
        limit = "must leave room for at least one more token within max_tokens and the longest sequence"
        return [violation(f"{path}.output_token_ids", f"{num_output} tokens", limit)]
    return []
