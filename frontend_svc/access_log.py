"""One line for each request that ended: who, where, how, how much, how long. Lengths and reasons, never a text."""

from __future__ import annotations

import logging

from frontend_svc.input_processor import Conversation
from frontend_svc.observer import RequestTimeline
from pagewire.runtime.log_fields import Value, fields, trace_ids

logger = logging.getLogger("frontend_svc.requests")

MAX_ID_CHARACTERS = 256
"""The longest id that is accepted; a refused request may have brought a longer one."""


class AccessLog:
    """A RequestObserver that logs."""

    def began(self, timeline: RequestTimeline) -> None:
        """Says nothing: a request that never ends is seen in `pagewire top`."""

    def ended(self, timeline: RequestTimeline) -> None:
        """Logs the request's end."""
        request = timeline.request
        trace = trace_ids(request.trace_context.traceparent if request.trace_context is not None else None)
        logger.info(
            "request ended",
            extra=fields(
                request_id=request.request_id[:MAX_ID_CHARACTERS],
                api_key=timeline.api_key,
                core=timeline.core,
                operation="chat" if isinstance(request.prompt, Conversation) else "generate",
                code=timeline.status_code,
                abort_reason=timeline.abort_reason.name if timeline.abort_reason is not None else None,
                **_results(timeline),
                duration_ms=_ms(timeline.received_ns, timeline.ended_ns),
                **trace,
            ),
        )


def _results(timeline: RequestTimeline) -> dict[str, Value]:
    """What came out; nothing where the request was refused before it was tokenized."""
    parent = timeline.parent
    if parent is None:
        return {}
    usage = parent.usage
    reasons = [child.finish_reason.name if child.finish_reason is not None else "NONE" for child in parent.children]
    return {
        "finish_reasons": ",".join(reasons),
        "prompt_tokens": usage.num_prompt_tokens,
        "cached_tokens": usage.num_cached_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "ttft_ms": _ms(timeline.received_ns, parent.first_token_ns) if parent.first_token_ns else None,
    }


def _ms(start_ns: int, end_ns: int) -> float:
    return round((end_ns - start_ns) / 1e6, 3)
