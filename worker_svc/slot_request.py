"""What a worker keeps of a request besides its tokens and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagewire.errors import FieldViolation, violation
from pagewire.plan import NewRequest
from pagewire.sampling import SamplingParams


@dataclass(slots=True)
class SlotRequest:
    """The request that holds a slot."""

    frontend_incarnation: str
    request_id: int
    params: SamplingParams
    child_index: int
    num_prompt_tokens: int
    prompt_logprobs_start: int
    stop_ids: tuple[int, ...]
    """End-of-sequence and stop token ids: masked until min_tokens are there."""
    error: str = ""
    """Why the request cannot go on; its rows are skipped and reported until the core releases the slot."""

    @property
    def wants_logprobs(self) -> bool:
        return self.params.logprobs is not None or bool(self.params.logprob_token_ids)

    @property
    def has_processors(self) -> bool:
        """Whether any logits processor may act on its rows (min_tokens apart, which depends on the position)."""
        p = self.params
        return bool(p.logit_bias or p.allowed_token_ids or p.bad_words_token_ids) or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def slot_request(new: NewRequest, vocab_size: int) -> SlotRequest:
    """The slot's request. One that is wrong in itself gets its error here: it must not fail the whole step."""
    found = _violations(new, vocab_size)
    return SlotRequest(
        frontend_incarnation=new.frontend_incarnation,
        request_id=new.request_id,
        params=new.sampling_params,
        child_index=new.child_index,
        num_prompt_tokens=new.num_prompt_tokens,
        prompt_logprobs_start=max(1, new.prompt_logprobs_start),
        stop_ids=tuple(sorted({*new.eos_token_ids, *new.sampling_params.stop_token_ids})),
        error="; ".join(v.description for v in found),
    )


def _violations(new: NewRequest, vocab_size: int) -> list[FieldViolation]:
    params = new.sampling_params
    found = params.violations(vocab_size)
    limit = f"must be in [0, {vocab_size})"
    for name, ids in (("token_ids", new.token_ids), ("eos_token_ids", np.asarray(new.eos_token_ids, np.int64))):
        outside = ((ids < 0) | (ids >= vocab_size)).nonzero()[0]
        if len(outside):
            found.append(violation(f"{name}[{outside[0]}]", int(ids[outside[0]]), limit))
    if params.seed is None and not params.is_greedy:
        found.append(violation("sampling_params.seed", None, "must be resolved before it reaches a worker"))
    if new.adapter is not None:
        found.append(violation("adapter", new.adapter.name, "adapters are not served by this build"))
    return found
