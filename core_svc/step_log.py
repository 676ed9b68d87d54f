"""The debug line per request and step, for whoever wants to watch the scheduler work."""

from __future__ import annotations

import logging
import os

from core_svc.plan_builder import ScheduledStep
from pagewire.runtime.log_fields import json_fields, trace_ids

logger = logging.getLogger("core_svc.steps")


def log_step(step: ScheduledStep) -> None:
    """Logs each row of a committed step.

    Such as `step=3 req=0 status=RUNNING computed=10 total=11 scheduled=1 new_tokens=[1234] finished=False pid=42`.
    """
    plan = step.plan
    for row, request in enumerate(step.requests):
        scheduled, computed = int(plan.num_scheduled_tokens[row]), int(plan.num_computed_tokens[row])
        num_sampled = int(plan.num_sampled_tokens[row])
        num_known = computed + scheduled - (num_sampled - 1) if num_sampled else request.num_tokens
        logger.info(
            "step=%d req=%d status=%s computed=%d total=%d scheduled=%d new_tokens=%s finished=%s pid=%d",
            step.number,
            request.key[1],
            request.status.name,
            min(computed + scheduled, request.num_tokens - 1),
            request.num_tokens,
            scheduled,
            request.token_ids[num_known:].tolist(),
            request.status.is_finished,
            os.getpid(),
            extra=json_fields(
                step=step.number,
                request_id=request.external_request_id,
                status=request.status.name,
                num_scheduled_tokens=scheduled,
                num_computed_tokens=computed,
                **trace_ids(request.trace_context.traceparent if request.trace_context is not None else None),
            ),
        )
