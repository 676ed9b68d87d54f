"""What the spans of a core's requests and steps say. Names of our own: no convention has any for an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_svc.observer import StepRecord
from core_svc.request import Request
from pagewire.engine import AbortReason
from pagewire.runtime.tracing import Attributes

if TYPE_CHECKING:
    from core_svc.scheduler import Scheduler
    from core_svc.trace_observer import OpenStep, TracedRequest


def request_attributes(request: Request, traced: TracedRequest) -> Attributes:
    """Of a request that has ended: who it was, what it took, how it ended."""
    finished = request.finished
    abort_reason = finished.abort_reason if finished is not None else AbortReason.UNSPECIFIED
    return {
        "pagewire.frontend": request.key[0],
        "pagewire.request": str(request.key[1]),
        "pagewire.completion": request.child_index,
        "pagewire.prompt_tokens": request.num_prompt_tokens,
        "pagewire.output_tokens": request.num_output_tokens,
        "pagewire.cached_tokens": request.num_hit_tokens,
        "pagewire.preemptions": request.num_preemptions,
        "pagewire.recomputed_tokens": traced.num_recomputed_tokens,
        "pagewire.finish_reason": request.status.finish_reason.name.lower(),
        "pagewire.abort_reason": abort_reason.name.lower() if abort_reason is not AbortReason.UNSPECIFIED else None,
        "pagewire.steps": traced.num_steps,
        "pagewire.step.first": traced.step_numbers[0] if traced.step_numbers else None,
        "pagewire.step.last": traced.last_step or None,
        "pagewire.step.numbers": traced.step_numbers or None,
        "error.type": (finished.error_code or None) if finished is not None else None,
    }


def step_attributes(record: StepRecord, found: OpenStep, scheduler: Scheduler | None) -> Attributes:
    """Of a step that was committed, or failed. A decode is a row that computes one token and samples from it."""
    step, plan = record.step, record.step.plan
    num_tokens = int(plan.num_scheduled_tokens.sum())
    is_decode = (plan.num_scheduled_tokens - plan.num_sampled_tokens == 0) & (plan.num_sampled_tokens > 0)
    num_decode_tokens = int(plan.num_scheduled_tokens[is_decode].sum())
    return {
        "pagewire.step": step.number,
        "pagewire.step.epoch": plan.epoch,
        "pagewire.step.batch_size": plan.num_rows,
        "pagewire.step.traced_requests": found.num_traced,
        "pagewire.step.new_requests": len(plan.new_requests),
        "pagewire.step.prefill_tokens": num_tokens - num_decode_tokens,
        "pagewire.step.decode_tokens": num_decode_tokens,
        "pagewire.step.token_budget": scheduler.config.max_num_batched_tokens if scheduler is not None else None,
        "pagewire.step.preemptions": found.num_preemptions,
        "pagewire.step.kv_use": round(found.kv_use, 4),
        "pagewire.step.schedule_s": (step.scheduled_ns - step.planned_ns) / 1e9,
        "pagewire.step.execute_s": (record.executed_ns - record.submitted_ns) / 1e9,
        "pagewire.step.update_s": (record.updated_ns - record.executed_ns) / 1e9,
        "error.type": getattr(record.error, "code", None) or (type(record.error).__name__ if record.error else None),
    }
