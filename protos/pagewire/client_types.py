"""What the public client takes and gives, in plain Python, and its conversion to and from pagewire.v1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.engine import FinishReason, ModelInfo, TraceContext
from pagewire.errors import InvalidArgumentError, violation
from pagewire.sampling import SamplingParams
from pagewire.sampling_wire import sampling_params_to_proto
from pagewire.types_wire import model_info_from_proto
from pagewire.v1 import frontend_pb2, types_pb2

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, str]]
"""A conversation as mappings with `role` (system, user, assistant or tool) and `content`; or one user message."""

_ROLES = {
    "system": frontend_pb2.CHAT_ROLE_SYSTEM,
    "user": frontend_pb2.CHAT_ROLE_USER,
    "assistant": frontend_pb2.CHAT_ROLE_ASSISTANT,
    "tool": frontend_pb2.CHAT_ROLE_TOOL,
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position: natural log of its probability, its rank (1 is the likeliest) and its text."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request cost; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """New text and tokens of one completion; on the last one also why it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Per token: the chosen one first, then the likeliest in order."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end."""
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """One message of a stream (new output of some completions), or, from `complete`, the whole answer."""

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage | None = None
    """Set on the last message."""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    is_finished: bool = False

    @property
    def text(self) -> str:
        """The text of the first completion in this message."""
        return next((output.text for output in self.outputs if output.index == 0), "")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served."""

    name: str
    info: ModelInfo
    has_chat_template: bool
    kv_cache_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a generating call takes besides its input and its sampling parameters."""

    request_id: str = ""
    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    return_prompt_token_ids: bool = False
    trace_context: TraceContext | None = None
    """The span that the call belongs to; None takes the one that is active, where the program uses opentelemetry."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request message, by name."""


def make_sampling_params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """The parameters with keyword overrides. Raises InvalidArgumentError for a name that does not exist."""
    base = params if params is not None else SamplingParams()
    values = dict(overrides)
    if isinstance(values.get("stop", base.stop), str):
        values["stop"] = (values.get("stop", base.stop),)
    unknown = [name for name in values if name not in SamplingParams.__slots__]
    if unknown:
        known = ", ".join(SamplingParams.__slots__)
        raise InvalidArgumentError([violation(f"sampling_params.{unknown[0]}", values[unknown[0]], f"one of {known}")])
    return replace(base, **values)


def generate_request(prompt: Prompt, params: SamplingParams, options: RequestOptions) -> frontend_pb2.GenerateRequest:
    """The message of a prompt. Raises InvalidArgumentError for what does not fit it."""
    request = frontend_pb2.GenerateRequest(sampling_params=sampling_params_to_proto(params))
    if isinstance(prompt, str):
        request.text = _text(prompt, "text")
    else:
        try:
            request.token_ids.ids.extend(prompt)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError([violation("token_ids", prompt, "must be text or 32-bit integers")]) from error
        request.token_ids.SetInParent()
    _apply(request, options)
    return request


def chat_request(messages: Messages, params: SamplingParams, options: RequestOptions) -> frontend_pb2.ChatRequest:
    """The message of a conversation. Raises InvalidArgumentError for what does not fit it."""
    request = frontend_pb2.ChatRequest(
        messages=chat_messages(messages), sampling_params=sampling_params_to_proto(params)
    )
    _apply(request, options)
    return request


def chat_messages(messages: Messages) -> list[frontend_pb2.ChatMessage]:
    """The conversation as messages. Raises InvalidArgumentError with the place of a bad one."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgumentError([violation(f"messages[{i}]", message, "must map role and content to texts")])
        role = message.get("role", "")
        if role not in _ROLES:
            raise InvalidArgumentError([violation(f"messages[{i}].role", role, f"must be one of {', '.join(_ROLES)}")])
        texts = {key: _text(value, f"messages[{i}].{key}") for key, value in message.items() if key != "role"}
        try:
            found.append(frontend_pb2.ChatMessage(role=_ROLES[role], **texts))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError([violation(f"messages[{i}]", dict(message), str(error))]) from error
    return found


def _text(value: Any, path: str) -> str:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError([violation(path, value, "must be text that UTF-8 can carry")]) from error
    return str(value)


def _apply(request: Any, options: RequestOptions) -> None:
    values = {
        "request_id": options.request_id,
        "model": options.model,
        "priority": options.priority,
        "cache_salt": options.cache_salt,
        "return_prompt_token_ids": options.return_prompt_token_ids,
        **options.extra,
    }
    for name, value in values.items():
        try:
            setattr(request, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgumentError([violation(name, value, str(error))]) from error


def read_response(proto: frontend_pb2.GenerateResponse | frontend_pb2.ChatResponse) -> Response:
    """A stream message as plain Python."""
    usage = None
    if proto.HasField("usage"):
        usage = Usage(proto.usage.prompt_tokens, proto.usage.completion_tokens, proto.usage.cached_tokens)
    return Response(
        request_id=proto.request_id,
        outputs=tuple(_output(output) for output in proto.outputs),
        usage=usage,
        prompt_token_ids=tuple(proto.prompt_token_ids.ids),
        prompt_logprobs=_logprobs(proto.prompt_logprobs),
        is_finished=proto.is_finished,
    )


def _output(proto: frontend_pb2.CompletionOutput) -> Output:
    stop = proto.WhichOneof("stop_reason")
    is_finished = proto.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
    return Output(
        index=proto.index,
        text=proto.text,
        token_ids=tuple(proto.token_ids),
        logprobs=_logprobs(proto.logprobs),
        finish_reason=FinishReason(proto.finish_reason) if is_finished else None,
        stop_reason=getattr(proto, stop) if stop else None,
        cumulative_logprob=proto.cumulative_logprob if proto.HasField("cumulative_logprob") else None,
    )


def _logprobs(positions: Iterable[frontend_pb2.TokenLogprobs]) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(
        tuple(TokenLogprob(c.token_id, c.logprob, c.rank, c.text) for c in position.candidates)
        for position in positions
    )


def read_model(proto: frontend_pb2.ServedModel) -> Model:
    """A served model as plain Python."""
    return Model(proto.name, model_info_from_proto(proto.info), proto.has_chat_template, proto.kv_cache_tokens)


def join_responses(responses: Iterable[Response]) -> Response:
    """The whole answer from a stream of deltas; completions in order of their index. Raises ValueError if empty."""
    parts = list(responses)
    if not parts:
        raise ValueError("no response came")
    by_index: dict[int, list[Output]] = {}
    for part in parts:
        for output in part.outputs:
            by_index.setdefault(output.index, []).append(output)
    outputs = tuple(
        Output(
            index=index,
            text="".join(o.text for o in found),
            token_ids=tuple(t for o in found for t in o.token_ids),
            logprobs=tuple(position for o in found for position in o.logprobs),
            finish_reason=found[-1].finish_reason,
            stop_reason=found[-1].stop_reason,
            cumulative_logprob=found[-1].cumulative_logprob,
        )
        for index, found in sorted(by_index.items())
    )
    return Response(
        request_id=parts[0].request_id,
        outputs=outputs,
        usage=parts[-1].usage,
        prompt_token_ids=parts[0].prompt_token_ids,
        prompt_logprobs=parts[0].prompt_logprobs,
        is_finished=parts[-1].is_finished,
    )
