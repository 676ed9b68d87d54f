"""A core's metrics: what its engine is seen doing, step by step and request by request."""

from __future__ import annotations

from collections.abc import Sequence

from core_svc.observer import EventKind, RequestEvent, StepRecord
from core_svc.plan_builder import ScheduledStep
from core_svc.request import Request, RequestKey
from pagewire.engine import AbortReason, Finished, FinishReason, TraceContext
from pagewire.runtime.instruments import COUNTS, STEP_SECONDS, Instruments

PHASES = ("schedule", "execute", "update", "publish")
WORKER_PHASES = ("wait", "prepare", "forward", "sample", "idle")
_TIMINGS = tuple((f"{phase}_ns", (phase,)) for phase in WORKER_PHASES)
ABORT_CAUSES = tuple(reason.name.lower() for reason in AbortReason)
FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason)


class EngineMetrics:
    """An EngineObserver that counts. What the engine counts itself is read by core_svc.state_metrics."""

    def __init__(self, instruments: Instruments) -> None:
        histogram, counter = instruments.histogram, instruments.counter
        self._step_s = histogram(
            "pagewire_core_step_duration_seconds",
            "Parts of a step: planning, waiting for the worker, committing, handing outputs out.",
            STEP_SECONDS,
            ("phase",),
            preset=[(phase,) for phase in PHASES],
        )
        self._worker_s = histogram(
            "pagewire_core_worker_step_duration_seconds",
            "Parts of a step on the worker, as it said itself; idle: since the step before ended.",
            STEP_SECONDS,
            ("phase",),
            preset=[(phase,) for phase in WORKER_PHASES],
        )
        self._hop_s = histogram(
            "pagewire_core_worker_hop_duration_seconds",
            "What of a step's execution the worker did not compute: the way there and back.",
            STEP_SECONDS,
        )
        self._scheduled = histogram(
            "pagewire_core_step_scheduled_tokens", "Tokens that a step computes.", COUNTS, unit="tokens"
        )
        self._rows = histogram("pagewire_core_step_batch_size", "Requests in a step.", COUNTS, unit="")
        self._steps_failed = counter("pagewire_core_steps_failed_total", "Steps that failed as a whole.")
        self._added = counter("pagewire_core_requests_added_total", "Requests taken from frontends.")
        self._ended = counter(
            "pagewire_core_requests_ended_total",
            "Requests that ended, by finish reason.",
            ("finish_reason",),
            preset=[(reason,) for reason in FINISH_REASONS],
        )
        self._aborts = counter(
            "pagewire_core_aborts_total",
            "Requests that were aborted, by who or what ended them.",
            ("cause",),
            preset=[(cause,) for cause in ABORT_CAUSES],
        )
        self._errors = counter(
            "pagewire_core_request_errors_total", "Requests that ended with an error, by gRPC code.", ("code",)
        )
        self._preemptions = counter("pagewire_core_preemptions_total", "Requests that lost their slot and blocks.")
        self._recomputed = counter(
            "pagewire_core_recomputed_tokens_total",
            "Computed tokens that preempted requests computed again: those lost, less those found in the prefix cache.",
            unit="tokens",
        )
        self._queue_s = histogram("pagewire_core_request_queue_duration_seconds", "From arrival to the first slot.")
        self._prefill_s = histogram("pagewire_core_request_prefill_duration_seconds", "From a slot to the first token.")
        self._decode_s = histogram("pagewire_core_request_decode_duration_seconds", "From the first to the last token.")
        self._lost: dict[RequestKey, int] = {}
        """Computed tokens that a preempted request lost, until it comes back."""

    def begin_step(self, step: ScheduledStep) -> TraceContext | None:
        """Nothing to note: everything is there at the end."""
        return None

    def observe(self, steps: Sequence[StepRecord], events: Sequence[RequestEvent], publish_ns: int) -> None:
        """Counts a turn of the engine's loop."""
        for record in steps:
            self._count_step(record)
        if publish_ns:
            self._step_s.observe(publish_ns / 1e9, ("publish",))
        for event in events:
            self._count_event(event)

    def _count_step(self, record: StepRecord) -> None:
        step, result = record.step, record.result
        if result is None:
            self._steps_failed.add()
            return
        plan, trace = step.plan, step.plan.trace_context
        execute_s = (record.executed_ns - record.submitted_ns) / 1e9
        self._step_s.observe((step.scheduled_ns - step.planned_ns) / 1e9, ("schedule",), trace)
        self._step_s.observe(execute_s, ("execute",), trace)
        self._step_s.observe((record.updated_ns - record.executed_ns) / 1e9, ("update",), trace)
        self._rows.observe(plan.num_rows)
        self._scheduled.observe(plan.total_num_scheduled_tokens)
        timings = result.timings
        computed_ns = timings.prepare_ns + timings.forward_ns + timings.sample_ns
        self._hop_s.observe(max(0.0, execute_s - computed_ns / 1e9))
        for name, labels in _TIMINGS:
            self._worker_s.observe(getattr(timings, name) / 1e9, labels, trace)

    def _count_event(self, event: RequestEvent) -> None:
        request = event.request
        match event.kind:
            case EventKind.ADDED:
                self._added.add()
            case EventKind.ADMITTED:
                if (num_lost := self._lost.pop(request.key, 0)) > event.num_tokens:
                    self._recomputed.add(num_lost - event.num_tokens)
            case EventKind.PREEMPTED:
                self._preemptions.add()
                self._lost[request.key] = event.num_tokens
            case EventKind.ENDED:
                self._lost.pop(request.key, None)
                if request.finished is not None:
                    self._count_end(request, request.finished)

    def _count_end(self, request: Request, finished: Finished) -> None:
        trace = request.trace_context
        self._ended.add(1, (finished.reason.name.lower(),))
        if finished.reason is FinishReason.ABORT:
            self._aborts.add(1, (finished.abort_reason.name.lower(),))
        elif finished.reason is FinishReason.ERROR:
            self._errors.add(1, (finished.error_code,))
        self._queue_s.observe(finished.queue_us / 1e6, (), trace)
        if request.first_token_ns:
            self._prefill_s.observe(finished.prefill_us / 1e6, (), trace)
            self._decode_s.observe(finished.decode_us / 1e6, (), trace)
