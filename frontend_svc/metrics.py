"""A frontend's metrics: requests from arrival to end by OpenTelemetry's GenAI conventions, use per key, cores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from frontend_svc.observer import RequestTimeline
from frontend_svc.parallel_sampling import ParentRequest
from pagewire.engine import AbortReason, EngineInfo, FinishReason
from pagewire.errors import PagewireError
from pagewire.runtime.instruments import STEP_SECONDS, Instruments, Labels

PROVIDER = "pagewire"
# The buckets that the conventions name.
DURATION_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
PER_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_CAUSES = tuple(reason.name.lower() for reason in AbortReason)
_FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason)


class RequestMetrics:
    """A RequestObserver that counts."""

    def __init__(self, instruments: Instruments) -> None:
        histogram, counter = instruments.histogram, instruments.counter
        self._duration_s = histogram(
            "gen_ai_server_request_duration_seconds",
            "Requests from arrival to end; error_type is the gRPC code, empty without an error.",
            DURATION_SECONDS,
            (*_GEN_AI, "error_type"),
        )
        self._first_token_s = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_SECONDS,
            _GEN_AI,
        )
        self._per_token_s = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per token after the first, of the longest completion of a request that ended well.",
            PER_TOKEN_SECONDS,
            _GEN_AI,
        )
        self._tokenize_s = histogram(
            "pagewire_frontend_tokenize_duration_seconds", "Checking and tokenizing a request.", STEP_SECONDS
        )
        self._add_s = histogram(
            "pagewire_frontend_add_duration_seconds", "Handing a request over to the core.", STEP_SECONDS
        )
        self._requests = counter(
            "pagewire_frontend_requests_total", "Requests that ended, by gRPC code and key.", ("code", "api_key")
        )
        use = "of requests that ended, by model and key"
        self._prompt_tokens, self._cached_tokens, self._completion_tokens = (
            counter(f"pagewire_frontend_{name}_tokens_total", f"{text} {use}.", ("model", "api_key"), "tokens")
            for name, text in (
                ("prompt", "Prompt tokens"),
                ("cached", "Prompt tokens that came from the prefix cache,"),
                ("completion", "Generated tokens"),
            )
        )
        self._completions = counter(
            "pagewire_frontend_completions_total",
            "Completions that ended, by finish reason; a request has n of them.",
            ("finish_reason",),
            preset=[(reason,) for reason in _FINISH_REASONS],
        )
        self._aborts = counter(
            "pagewire_frontend_aborts_total",
            "Requests that this frontend ended early, by cause.",
            ("cause",),
            preset=[(cause,) for cause in _CAUSES],
        )
        self._rejections = counter(
            "pagewire_frontend_rejections_total",
            "Requests that no core took, by gRPC code and google.rpc.ErrorInfo reason.",
            ("code", "reason"),
        )
        self._num_live = 0
        instruments.number("gauge", "pagewire_frontend_requests_live", "Requests that live.", lambda: self._num_live)

    def began(self, timeline: RequestTimeline) -> None:
        """One more lives."""
        self._num_live += 1

    def ended(self, timeline: RequestTimeline) -> None:
        """Counts a request."""
        self._num_live -= 1
        code, trace = timeline.status_code, timeline.request.trace_context
        gen_ai = (timeline.operation, PROVIDER, timeline.model)
        duration_s = (timeline.ended_ns - timeline.received_ns) / 1e9
        self._duration_s.observe(duration_s, (*gen_ai, "" if code == "OK" else code), trace)
        self._requests.add(1, (code, timeline.api_key))
        if timeline.tokenized_ns:
            self._tokenize_s.observe((timeline.tokenized_ns - timeline.tokenize_ns) / 1e9, (), trace)
        if timeline.added_ns:
            self._add_s.observe((timeline.added_ns - timeline.tokenized_ns) / 1e9, (), trace)
        elif isinstance(timeline.error, PagewireError):
            self._rejections.add(1, (code, timeline.error.reason))
        cause = _abort_cause(timeline)
        if cause is not None:
            self._aborts.add(1, (cause,))
        if timeline.parent is not None and timeline.added_ns:
            self._count_tokens(timeline, timeline.parent, gen_ai)

    def _count_tokens(self, timeline: RequestTimeline, parent: ParentRequest, gen_ai: Labels) -> None:
        trace, usage, use = timeline.request.trace_context, parent.usage, (timeline.model, timeline.api_key)
        self._prompt_tokens.add(usage.num_prompt_tokens, use)
        self._cached_tokens.add(usage.num_cached_tokens, use)
        self._completion_tokens.add(usage.num_completion_tokens, use)
        for child in parent.children:
            # One that was given up with its request has no reason of its own.
            is_aborted = timeline.abort_reason is not None
            reason = child.finish_reason or (FinishReason.ABORT if is_aborted else FinishReason.ERROR)
            self._completions.add(1, (reason.name.lower(),))
        if not parent.first_token_ns:
            return
        self._first_token_s.observe((parent.first_token_ns - timeline.received_ns) / 1e9, gen_ai, trace)
        longest = max(child.num_tokens for child in parent.children)
        if longest > 1 and timeline.error is None:
            decode_s = (timeline.ended_ns - parent.first_token_ns) / 1e9
            self._per_token_s.observe(decode_s / (longest - 1), gen_ai, trace)


def _abort_cause(timeline: RequestTimeline) -> str | None:
    """Who ended it early; None where it ended by itself, was refused or failed in the core."""
    if isinstance(timeline.error, PagewireError) and timeline.error.reason == "SLOW_CONSUMER":
        return "slow_consumer"
    if isinstance(timeline.error, PagewireError) and timeline.error.reason == "SHUTDOWN" and timeline.added_ns:
        return "shutdown"
    return None if timeline.abort_reason is None else timeline.abort_reason.name.lower()


@dataclass(frozen=True, slots=True)
class _Link:
    target: str
    info: EngineInfo


class CoreLinks:
    """The life of connections to cores, as the clients tell it; each client is its own key."""

    def __init__(self, instruments: Instruments) -> None:
        self._links: dict[object, _Link] = {}
        name = "pagewire_frontend_core_"
        instruments.number("gauge", name + "connections", "Cores that are connected.", lambda: len(self._links))
        self._connects = instruments.counter(name + "connects_total", "Connections made to a core, the first too.")
        self._losses = instruments.counter(name + "losses_total", "Cores lost with what they had.")
        self._reconnects = instruments.counter(
            name + "stream_reconnects_total", "Output streams opened again after a break; nothing was lost."
        )
        instruments.info(
            name + "info", "The cores that are connected.", ("target", "incarnation", "model"), self._cores
        )

    def _cores(self) -> Iterable[Labels]:
        links = list(self._links.values())
        return [(link.target, link.info.core_incarnation, link.info.model.model) for link in links]

    def opened(self, client: object, target: str, info: EngineInfo) -> None:
        """A core is connected."""
        self._links[client] = _Link(target, info)
        self._connects.add()

    def reopened(self, client: object) -> None:
        """Its stream broke and is open again."""
        if client in self._links:
            self._reconnects.add()

    def lost(self, client: object, *, is_closed: bool) -> None:
        """It is gone, or `is_closed`: this frontend let go of it."""
        if self._links.pop(client, None) is not None and not is_closed:
            self._losses.add()
