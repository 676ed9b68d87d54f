"""Sampling parameters as every service uses them, and their checks.

The frontend validates what a client sent; the core validates again what a frontend sent (one bad request must never
reach a batch). Both call `SamplingParams.violations`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagewire.errors import FieldViolation, violation

MAX_N = 128
MAX_LOGPROBS = 100
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 4096
MAX_TOKEN_LIST = 1024
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1


@dataclass(slots=True)
class StructuredOutputs:
    """A constraint on the output's form: its kind and its text (JSON schema, regex, grammar, JSON list of choices)."""

    kind: str
    """One of json_schema, json_object, regex, choices, grammar, structural_tag."""
    spec: str = ""
    choices: tuple[str, ...] = ()


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Defaults are those of `pagewire.v1.SamplingParams`.

    `max_tokens` None means what the model's length allows; `seed` None means that the frontend draws one.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    detokenize: bool = True
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether prompt blocks may come from the cache. Prompt logprobs need every position computed."""
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    def logprob_width(self, vocab_size: int) -> int:
        """Most (token, log-probability) pairs of a sampled token: itself, the likeliest, those named; 0 if unwanted."""
        if self.logprobs is None and not self.logprob_token_ids:
            return 0
        num_likeliest = self.logprobs or 0
        return 1 + (vocab_size if num_likeliest < 0 else num_likeliest) + len(self.logprob_token_ids)

    def prompt_logprob_width(self, vocab_size: int) -> int:
        """Most pairs of one prompt position; 0 if unwanted."""
        if self.prompt_logprobs is None:
            return 0
        return 1 + (vocab_size if self.prompt_logprobs < 0 else self.prompt_logprobs)

    def violations(self, vocab_size: int, path: str = "sampling_params") -> list[FieldViolation]:
        """Everything that is wrong with these parameters for a model of `vocab_size` tokens; empty if all is well."""
        return [v for check in (_check_scalars, _check_limits, _check_tokens) for v in check(self, vocab_size, path)]


def _in_range(low: float, value: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _check_scalars(p: SamplingParams, vocab_size: int, path: str) -> list[FieldViolation]:
    rules: list[tuple[bool, str, object, str]] = [
        (1 <= p.n <= MAX_N, "n", p.n, f"must be in [1, {MAX_N}]"),
        (
            _in_range(0, p.temperature, MAX_TEMPERATURE),
            "temperature",
            p.temperature,
            f"must be in [0, {MAX_TEMPERATURE:g}]",
        ),
        (isinstance(p.top_k, int) and -1 <= p.top_k <= MAX_INT32, "top_k", p.top_k, "must be an integer, -1 or more"),
        (0 < p.top_p <= 1, "top_p", p.top_p, "must be in (0, 1]"),
        (_in_range(0, p.min_p, 1), "min_p", p.min_p, "must be in [0, 1]"),
        (
            math.isfinite(p.repetition_penalty) and p.repetition_penalty > 0,
            "repetition_penalty",
            p.repetition_penalty,
            "must be finite and above 0",
        ),
        (_in_range(-2, p.presence_penalty, 2), "presence_penalty", p.presence_penalty, "must be in [-2, 2]"),
        (_in_range(-2, p.frequency_penalty, 2), "frequency_penalty", p.frequency_penalty, "must be in [-2, 2]"),
        (p.seed is None or 0 <= p.seed <= MAX_SEED, "seed", p.seed, "must be an unsigned 64-bit integer"),
        (not (p.is_greedy and p.n > 1), "n", p.n, "must be 1 when temperature is 0: greedy completions are all equal"),
    ]
    return [violation(f"{path}.{name}", value, limit) for is_ok, name, value, limit in rules if not is_ok]


def _check_limits(p: SamplingParams, vocab_size: int, path: str) -> list[FieldViolation]:
    found = []
    if p.max_tokens is not None and not 1 <= p.max_tokens <= MAX_INT32:
        found.append(violation(f"{path}.max_tokens", p.max_tokens, "must be at least 1"))
    highest = MAX_INT32 if p.max_tokens is None else p.max_tokens
    if not 0 <= p.min_tokens <= highest:
        found.append(
            violation(f"{path}.min_tokens", p.min_tokens, f"must be in [0, max_tokens], max_tokens is {p.max_tokens}")
        )
    for name, count in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if count is not None and not -1 <= count <= MAX_LOGPROBS:
            found.append(
                violation(f"{path}.{name}", count, f"must be in [0, {MAX_LOGPROBS}], or -1 for the whole vocabulary")
            )
    if len(p.stop) > MAX_STOP_STRINGS:
        found.append(violation(f"{path}.stop", f"{len(p.stop)} strings", f"at most {MAX_STOP_STRINGS} strings"))
    for i, stop in enumerate(p.stop):
        if not stop or len(stop.encode()) > MAX_STOP_STRING_BYTES:
            found.append(violation(f"{path}.stop[{i}]", stop, f"must have 1 to {MAX_STOP_STRING_BYTES} bytes"))
    if p.stop and not p.detokenize:
        found.append(violation(f"{path}.stop", list(p.stop), "needs detokenize"))
    return found


def _check_tokens(p: SamplingParams, vocab_size: int, path: str) -> list[FieldViolation]:
    found = []
    limit = f"token ids must be in [0, {vocab_size})"

    def check(name: str, ids: tuple[int, ...], most: int) -> None:
        if len(ids) > most:
            found.append(violation(f"{path}.{name}", f"{len(ids)} ids", f"at most {most} ids"))
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                found.append(violation(f"{path}.{name}[{i}]", token_id, limit))
                return

    check("allowed_token_ids", p.allowed_token_ids, vocab_size)
    check("stop_token_ids", p.stop_token_ids, MAX_TOKEN_LIST)
    check("logprob_token_ids", p.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
    for i, word in enumerate(p.bad_words):
        if not word:
            found.append(violation(f"{path}.bad_words[{i}]", word, "must not be empty"))
    if len(p.bad_words_token_ids) > MAX_TOKEN_LIST:
        found.append(
            violation(f"{path}.bad_words_token_ids", len(p.bad_words_token_ids), f"at most {MAX_TOKEN_LIST} sequences")
        )
    for i, sequence in enumerate(p.bad_words_token_ids):
        if not sequence:
            found.append(violation(f"{path}.bad_words_token_ids[{i}]", list(sequence), "must not be empty"))
        check(f"bad_words_token_ids[{i}].ids", sequence, MAX_TOKEN_LIST)
    for token_id, bias in p.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            found.append(violation(f"{path}.logit_bias[{token_id}]", token_id, limit))
        elif not _in_range(-100, bias, 100):
            found.append(violation(f"{path}.logit_bias[{token_id}]", bias, "must be in [-100, 100]"))
    return found
