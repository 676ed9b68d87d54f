"""FrontendService's messages to plain Python and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from frontend_svc.input_processor import Conversation, TextRequest
from frontend_svc.outputs import CompletionOutput, OutputKind, PositionLogprobs, RequestOutput, Usage
from frontend_svc.service import ServedModel
from pagewire.engine import AbortOutcome, TraceContext
from pagewire.errors import InvalidArgumentError, violation
from pagewire.sampling_wire import sampling_params_from_proto
from pagewire.stats import FrontendStats
from pagewire.stats_wire import fill
from pagewire.types_wire import model_info_to_proto
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import types_pb2

ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}
_OUTPUT_KINDS = {
    types_pb2.OUTPUT_KIND_UNSPECIFIED: OutputKind.DELTA,
    types_pb2.OUTPUT_KIND_DELTA: OutputKind.DELTA,
    types_pb2.OUTPUT_KIND_CUMULATIVE: OutputKind.CUMULATIVE,
    types_pb2.OUTPUT_KIND_FINAL_ONLY: OutputKind.FINAL_ONLY,
}
MAX_MESSAGES = 65_536
MAX_JSON_BYTES = 4 * 2**20
Response = TypeVar("Response", pb.GenerateResponse, pb.ChatResponse)


def text_request_from_generate(
    request: pb.GenerateRequest, remaining_s: float | None, trace_context: TraceContext | None
) -> TextRequest:
    """A GenerateRequest. Raises InvalidArgumentError where the message itself is wrong."""
    prompt: str | Sequence[int]
    match request.WhichOneof("prompt"):
        case "text":
            prompt = request.text
        case "token_ids":
            # As it is: a list of millions is refused by its length, and copying it would hold up everybody else.
            prompt = request.token_ids.ids
        case _:
            raise InvalidArgumentError([violation("prompt", None, "one of text and token_ids must be set")])
    return _text_request(
        request,
        prompt,
        request.add_special_tokens if request.HasField("add_special_tokens") else None,
        remaining_s,
        trace_context,
    )


def text_request_from_chat(
    request: pb.ChatRequest, remaining_s: float | None, trace_context: TraceContext | None
) -> TextRequest:
    """A ChatRequest. Raises InvalidArgumentError where the message itself is wrong."""
    if request.continue_final_message and request.add_generation_prompt:
        limit = "excludes add_generation_prompt; leave that unset or false"
        raise InvalidArgumentError([violation("continue_final_message", True, limit)])
    adds = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
    conversation = Conversation(
        messages_from_proto(request.messages, "messages"),
        tools=_json_list(request.tools_json, "tools_json"),
        add_generation_prompt=adds and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        template_kwargs=_json_object(request.template_kwargs_json, "template_kwargs_json"),
    )
    return _text_request(request, conversation, None, remaining_s, trace_context)


def _text_request(
    request: pb.GenerateRequest | pb.ChatRequest,
    prompt: str | Sequence[int] | Conversation,
    add_special_tokens: bool | None,
    remaining_s: float | None,
    trace_context: TraceContext | None,
) -> TextRequest:
    if request.output_kind not in _OUTPUT_KINDS:
        raise InvalidArgumentError([violation("output_kind", int(request.output_kind), "must be a known OutputKind")])
    return TextRequest(
        prompt=prompt,
        sampling_params=sampling_params_from_proto(request.sampling_params),
        request_id=request.request_id,
        model=request.model,
        output_kind=_OUTPUT_KINDS[request.output_kind],
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        num_media=len(request.media),
        returns_prompt_token_ids=request.return_prompt_token_ids,
        add_special_tokens=add_special_tokens,
        remaining_s=remaining_s,
        trace_context=trace_context,
    )


def unread_request(request: pb.GenerateRequest | pb.ChatRequest, trace_context: TraceContext | None) -> TextRequest:
    """What is known of a message that says nothing that could be read."""
    prompt: str | Conversation = Conversation([]) if isinstance(request, pb.ChatRequest) else ""
    return TextRequest(prompt, request_id=request.request_id, model=request.model, trace_context=trace_context)


def messages_from_proto(messages: Sequence[pb.ChatMessage], path: str) -> list[dict[str, Any]]:
    """Messages as templates read them; what is empty is left out, but for the content."""
    if not messages:
        raise InvalidArgumentError([violation(path, [], "must not be empty")])
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgumentError([violation(path, f"{len(messages)} messages", f"at most {MAX_MESSAGES} messages")])
    found = []
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidArgumentError(
                [violation(f"{path}[{i}].role", int(message.role), "must be one of SYSTEM, USER, ASSISTANT, TOOL")]
            )
        entry: dict[str, Any] = {"role": ROLES[message.role], "content": message.content}
        if message.name:
            entry["name"] = message.name
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        calls = _json_list(message.tool_calls_json, f"{path}[{i}].tool_calls_json")
        if calls is not None:
            entry["tool_calls"] = calls
        found.append(entry)
    return found


def conversation_from_tokenize(conversation: pb.TokenizeRequest.Conversation) -> Conversation:
    """The conversation of a TokenizeRequest."""
    adds = conversation.add_generation_prompt if conversation.HasField("add_generation_prompt") else True
    messages = messages_from_proto(conversation.messages, "conversation.messages")
    return Conversation(messages, add_generation_prompt=adds)


def _json(text: str, path: str) -> Any:
    if len(text) * 4 > MAX_JSON_BYTES and len(text.encode()) > MAX_JSON_BYTES:
        raise InvalidArgumentError([violation(path, text, f"must have at most {MAX_JSON_BYTES} bytes")])
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError([violation(path, text, f"must be JSON ({error})")]) from error


def _json_list(text: str, path: str) -> list[dict[str, Any]] | None:
    if not text:
        return None
    value = _json(text, path)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgumentError([violation(path, text, "must be a JSON list of objects")])
    return value


def _json_object(text: str, path: str) -> dict[str, Any]:
    if not text:
        return {}
    value = _json(text, path)
    if not isinstance(value, dict):
        raise InvalidArgumentError([violation(path, text, "must be a JSON object")])
    return value


def fill_response(response: Response, output: RequestOutput) -> Response:
    """Makes a GenerateResponse or ChatResponse say this output and nothing else; returns it."""
    response.Clear()
    response.request_id = output.request_id
    for completion in output.outputs:
        _fill_completion(response.outputs.add(), completion)
    if output.prompt_token_ids is not None:
        response.prompt_token_ids.ids.extend(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        response.prompt_logprobs.extend(_token_logprobs(position) for position in output.prompt_logprobs)
    if output.usage is not None:
        response.usage.CopyFrom(usage_to_proto(output.usage))
    response.is_finished = output.finished
    return response


def _fill_completion(message: pb.CompletionOutput, completion: CompletionOutput) -> None:
    message.index = completion.index
    message.text = completion.text
    message.token_ids.extend(completion.token_ids)
    if completion.logprobs is not None:
        message.logprobs.extend(_token_logprobs(position) for position in completion.logprobs)
    if completion.cumulative_logprob is not None:
        message.cumulative_logprob = completion.cumulative_logprob
    if completion.finish_reason is not None:
        message.finish_reason = types_pb2.FinishReason.ValueType(completion.finish_reason)
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason


def _token_logprobs(position: PositionLogprobs) -> pb.TokenLogprobs:
    message = pb.TokenLogprobs()
    for token_id, candidate in position.items():
        message.candidates.add(
            token_id=token_id, logprob=candidate.logprob, rank=candidate.rank, text=candidate.decoded_token
        )
    return message


def usage_to_proto(usage: Usage) -> types_pb2.Usage:
    """Tokens spent."""
    return types_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        cached_tokens=usage.num_cached_tokens,
    )


def abort_response(request_ids: Sequence[str], outcomes: Sequence[AbortOutcome]) -> pb.AbortResponse:
    """One result per id, in order."""
    response = pb.AbortResponse()
    for request_id, outcome in zip(request_ids, outcomes, strict=True):
        response.results.add(request_id=request_id, outcome=types_pb2.AbortOutcome.ValueType(outcome))
    return response


def served_model_to_proto(model: ServedModel) -> pb.ServedModel:
    """A model as clients see it."""
    return pb.ServedModel(
        name=model.info.model,
        info=model_info_to_proto(model.info),
        has_chat_template=model.has_chat_template,
        kv_cache_tokens=model.kv_cache_tokens,
    )


def stats_to_proto(stats: FrontendStats) -> pb.GetStatsResponse:
    """Numbers about the frontend."""
    response: pb.GetStatsResponse = fill(pb.GetStatsResponse(), stats)
    return response
