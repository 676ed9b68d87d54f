"""What a caller gets: the output of a request and of each of its completions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pagewire.engine import FinishReason
from pagewire.errors import PagewireError


class OutputKind(enum.IntEnum):
    """How much each output carries. Values are those of pagewire.v1.OutputKind."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL_ONLY = 3


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one candidate token."""

    logprob: float
    rank: int
    """1 for the likeliest; 0 where the rank is not known (ids asked for by name)."""
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""By token id, the chosen token first, then the likeliest in order. Empty for the first prompt position."""


@dataclass(slots=True)
class Usage:
    """Tokens spent."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class CompletionOutput:
    """New (or all) output of one completion."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token id, where asked for."""
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for an end-of-sequence token."""


@dataclass(slots=True)
class RequestOutput:
    """Output of a request."""

    request_id: str
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    finished: bool = False
    usage: Usage | None = None
    error: PagewireError | None = None
    """Why it failed, where its completions end with FinishReason.ERROR. Only `LLM` gives such outputs: over the wire
    a failed request ends its call."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache; 0 until the request has ended."""
        return 0 if self.usage is None else self.usage.num_cached_tokens
