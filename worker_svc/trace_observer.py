"""A worker's spans: `execute` under the step of the core that its plan names; a plan that names none is not traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.errors import PagewireError
from pagewire.plan import StepPlan, StepResult
from pagewire.runtime.tracing import Attributes

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer


class TraceObserver:
    """Traces the steps of one rank.

    Args:
        tracer: makes the spans.
        device: cpu or cuda, and so what clock timed the forward pass and the sampling.
        rank: this worker's place in its group.
    """

    def __init__(self, tracer: Tracer, device: str, rank: int = 0) -> None:
        self._tracer = tracer
        self._who: Attributes = {
            "pagewire.worker.rank": rank,
            "pagewire.worker.device": device,
            "pagewire.execute.clock": "cuda_event" if device == "cuda" else "cpu",
        }

    def executed(
        self, plan: StepPlan, result: StepResult | None, error: BaseException | None, started_ns: int, ended_ns: int
    ) -> None:
        """Makes the span."""
        if plan.trace_context is None or not plan.trace_context.traceparent:
            return
        span = self._tracer.begin("execute", "server", started_ns, parent=plan.trace_context)
        if not span.is_sampled:
            return
        attributes = {
            **self._who,
            "pagewire.step.epoch": plan.epoch,
            "pagewire.execute.step": plan.step,
            "pagewire.step.batch_size": plan.num_rows,
            "pagewire.step.tokens": plan.total_num_scheduled_tokens,
        }
        if result is not None:
            attributes |= _timings(result)
        if error is None:
            self._tracer.end(span, ended_ns, attributes)
            return
        attributes["error.type"] = error.code if isinstance(error, PagewireError) else type(error).__name__
        self._tracer.end(span, ended_ns, attributes, error=str(error))


def _timings(result: StepResult) -> Attributes:
    timings = result.timings
    return {
        "pagewire.execute.wait_s": timings.wait_ns / 1e9,
        "pagewire.execute.idle_s": timings.idle_ns / 1e9,
        "pagewire.execute.prepare_s": timings.prepare_ns / 1e9,
        "pagewire.execute.forward_s": timings.forward_ns / 1e9,
        "pagewire.execute.sample_s": timings.sample_ns / 1e9,
        "pagewire.execute.failed_rows": len(result.errors) or None,
    }
