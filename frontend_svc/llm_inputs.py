"""What a caller gives LLM, in its many forms, as lists of one form; what has a wrong type is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Real
from typing import Any

from frontend_svc.input_processor import Conversation
from pagewire.errors import InvalidArgumentError, violation
from pagewire.sampling import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
_PROMPT_LIMIT = "must be a text, a list of token ids, or a mapping with prompt or prompt_token_ids"


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[str | Sequence[int] | Conversation]:
    """The prompts as a list; a list of integers is one prompt. Raises InvalidArgumentError for anything else."""
    if isinstance(prompts, str | Mapping):
        many: Sequence[Any] = [prompts]
    else:
        try:
            many = list(prompts)
        except TypeError as error:
            raise InvalidArgumentError([violation("prompts", prompts, _PROMPT_LIMIT)]) from error
        if many and all(isinstance(entry, int) for entry in many):
            many = [many]
    return [_prompt(prompt, i) for i, prompt in enumerate(many)]


def _prompt(prompt: Any, index: int) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
    if isinstance(prompt, str):
        return prompt
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and all(isinstance(token_id, int) for token_id in ids):
        return list(ids)
    raise InvalidArgumentError([violation(f"prompts[{index}]", prompt, _PROMPT_LIMIT)])


def conversations(messages: Any) -> Iterator[list[Message]]:
    """One conversation, or several, as lists of messages. Raises InvalidArgumentError for anything else."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    is_one = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
    many = [messages] if is_one else messages
    limit = "must be a list of mappings with role and content"
    if not isinstance(many, Iterable):
        raise InvalidArgumentError([violation("messages", messages, limit)])
    for i, conversation in enumerate(many):
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not all(isinstance(message, Mapping) for message in conversation):
            raise InvalidArgumentError([violation("messages" if is_one else f"messages[{i}]", conversation, limit)])
        yield list(conversation)


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams per prompt. Raises InvalidArgumentError where their number or the type of a value is wrong."""
    if params is None or isinstance(params, SamplingParams):
        return [_normalized(params or SamplingParams())] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise InvalidArgumentError([violation("sampling_params", params, "must be SamplingParams, or a list of them")])
    if len(params) != num_prompts:
        limit = f"must be one, or one per prompt, {num_prompts}"
        raise InvalidArgumentError([violation("sampling_params", f"{len(params)} entries", limit)])
    return [_normalized(entry) for entry in params]


def _normalized(params: SamplingParams) -> SamplingParams:
    """Lists become tuples, and a single stop string a list of one. Refuses what has a wrong type, as the wire does."""
    found = [
        violation(f"sampling_params.{name}", getattr(params, name), limit)
        for names, is_right, limit in _TYPES
        for name in names
        if not is_right(getattr(params, name))
    ]
    if found:
        raise InvalidArgumentError(found)
    stop: Any = params.stop
    return replace(
        params,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words=tuple(params.bad_words or ()),
        bad_words_token_ids=tuple(tuple(ids) for ids in params.bad_words_token_ids or ()),
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        logit_bias=dict(params.logit_bias or {}),
    )


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_list(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    is_list = isinstance(value, Sequence | Set) and not isinstance(value, str)
    return value is None or (is_list and all(map(is_entry, value)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("n", "top_k", "min_tokens"), _is_whole, "must be an integer"),
    (
        ("max_tokens", "seed", "logprobs", "prompt_logprobs"),
        lambda value: value is None or _is_whole(value),
        "must be an integer or None",
    ),
    (
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        lambda value: isinstance(value, Real) and not isinstance(value, bool),
        "must be a number",
    ),
    (("stop",), lambda value: _is_text(value) or _is_list(value, _is_text), "must be a string or a list of strings"),
    (("bad_words",), lambda value: _is_list(value, _is_text), "must be a list of strings"),
    (
        ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"),
        lambda value: _is_list(value, _is_whole),
        "must be a list of integers",
    ),
    (
        ("bad_words_token_ids",),
        lambda value: _is_list(value, lambda ids: ids is not None and _is_list(ids, _is_whole)),
        "must be lists of integers",
    ),
    (
        ("logit_bias",),
        lambda value: (
            value is None
            or (isinstance(value, Mapping) and all(_is_whole(k) and isinstance(v, Real) for k, v in value.items()))
        ),
        "must map token ids to numbers",
    ),
)
