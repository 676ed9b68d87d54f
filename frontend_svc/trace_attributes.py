"""What a request's spans say of it, by OpenTelemetry's current conventions for gRPC and for generative AI.

Text of prompts and answers, and what callers make of it (stop strings), is left out unless `captures_content`.
"""

from __future__ import annotations

import json
from typing import Any

from frontend_svc.input_processor import Conversation, TextRequest
from frontend_svc.observer import RequestTimeline
from frontend_svc.outputs import OutputKind
from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.runtime.tracing import Attributes, AttributeValue

SERVICE = "pagewire.v1.FrontendService"
SERVER_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))
"""Status codes with which a server's span counts as failed; with others the caller did something wrong."""
MAX_NAME_LENGTH = 256
"""Of names that callers choose: what is longer is refused, and no reason to fill a trace."""
_INT64_MAX = 2**63 - 1


def method_of(request: TextRequest) -> str:
    """The RPC that brought it, which is its server span's name too."""
    return f"{SERVICE}/{'Chat' if isinstance(request.prompt, Conversation) else 'Generate'}"


def description_of(error: BaseException | None) -> str:
    """What went wrong, without what the caller wrote."""
    if isinstance(error, InvalidArgumentError):
        return "; ".join(f"{v.field}: {v.limit}" for v in error.violations[:8])
    if isinstance(error, PagewireError):
        return error.message
    return "" if error is None else type(error).__name__


def first_attributes(timeline: RequestTimeline) -> dict[str, AttributeValue]:
    """Known when it comes; the sampler sees these."""
    request = timeline.request
    return {
        "rpc.system.name": "grpc",
        "rpc.method": method_of(request),
        "gen_ai.operation.name": timeline.operation,
        "gen_ai.provider.name": "pagewire",
        "gen_ai.request.model": (request.model or timeline.model)[:MAX_NAME_LENGTH] or None,
    }


def server_attributes(timeline: RequestTimeline, captures_content: bool) -> Attributes:
    """Everything that its server span says once it has ended."""
    status = timeline.status_code
    found = first_attributes(timeline) | _request_attributes(timeline.request) | _response_attributes(timeline)
    found["rpc.response.status_code"] = status
    found["error.type"] = status if status in SERVER_FAULTS else None
    found["pagewire.abort_reason"] = timeline.abort_reason.name.lower() if timeline.abort_reason is not None else None
    if isinstance(timeline.error, InvalidArgumentError):
        found["pagewire.refused_fields"] = [v.field for v in timeline.error.violations[:8]]
    if captures_content:
        found |= _content(timeline)
    return found


def _request_attributes(request: TextRequest) -> dict[str, AttributeValue]:
    params = request.sampling_params
    return {
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.seed": params.seed if params.seed is not None and params.seed <= _INT64_MAX else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.stream": request.output_kind is not OutputKind.FINAL_ONLY,
        "gen_ai.response.id": request.request_id[:MAX_NAME_LENGTH],
        "pagewire.priority": request.priority or None,
    }


def _response_attributes(timeline: RequestTimeline) -> dict[str, AttributeValue]:
    parent = timeline.parent
    if parent is None:
        return {}
    usage, is_streamed = parent.usage, timeline.request.output_kind is not OutputKind.FINAL_ONLY
    waited_ns = parent.first_token_ns - timeline.received_ns
    return {
        "gen_ai.response.model": timeline.model,
        "gen_ai.response.finish_reasons": finish_reasons(timeline),
        "gen_ai.response.time_to_first_chunk": waited_ns / 1e9 if parent.first_token_ns and is_streamed else None,
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
    }


def finish_reasons(timeline: RequestTimeline) -> list[str]:
    """One for each completion; `error` where it ended with its request."""
    children = timeline.parent.children if timeline.parent is not None else []
    return [child.finish_reason.name.lower() if child.finish_reason is not None else "error" for child in children]


def _content(timeline: RequestTimeline) -> dict[str, AttributeValue]:
    """Prompt and answers as JSON, in the conventions' schema of messages."""
    request, texts = timeline.request, timeline.texts or {}
    answers = [
        {"role": "assistant", "parts": _parts(texts.get(index, "")), "finish_reason": reason}
        for index, reason in enumerate(finish_reasons(timeline))
    ]
    return {
        "gen_ai.request.stop_sequences": list(request.sampling_params.stop) or None,
        "gen_ai.input.messages": _json(_messages(request.prompt)),
        "gen_ai.output.messages": _json(answers),
    }


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, Conversation):
        return [{"role": m.get("role", ""), "parts": _parts(m.get("content", ""))} for m in prompt.messages]
    return [{"role": "user", "parts": _parts(prompt)}] if isinstance(prompt, str) else []


def _parts(text: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "content": text}]


def _json(messages: list[dict[str, Any]]) -> str | None:
    return json.dumps(messages, ensure_ascii=True, default=str) if messages else None
