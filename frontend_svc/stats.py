"""What a frontend tells of itself: counts of requests, and which cores it has."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from frontend_svc.observer import RequestTimeline
from pagewire.errors import DeadlineExceededError
from pagewire.stats import FrontendStats


class RequestCounters:
    """A RequestObserver that counts."""

    def __init__(self) -> None:
        self._counts = FrontendStats()

    def began(self, timeline: RequestTimeline) -> None:
        """One more came."""
        self._counts = replace(self._counts, num_received=self._counts.num_received + 1)

    def ended(self, timeline: RequestTimeline) -> None:
        """Counts its tokens, and its end as one of three kinds."""
        counts, error = self._counts, timeline.error
        is_aborted = isinstance(error, asyncio.CancelledError | DeadlineExceededError)
        is_aborted = is_aborted or (error is None and timeline.abort_reason is not None)
        usage = timeline.parent.usage if timeline.parent is not None else None
        self._counts = replace(
            counts,
            num_succeeded=counts.num_succeeded + (error is None and not is_aborted),
            num_failed=counts.num_failed + (error is not None and not is_aborted),
            num_aborted=counts.num_aborted + is_aborted,
            num_prompt_tokens=counts.num_prompt_tokens + (usage.num_prompt_tokens if usage else 0),
            num_completion_tokens=counts.num_completion_tokens + (usage.num_completion_tokens if usage else 0),
        )

    def stats(self) -> FrontendStats:
        """The counts, and how many requests live; the rest of a FrontendStats is for others to fill."""
        counts = self._counts
        num_ended = counts.num_succeeded + counts.num_failed + counts.num_aborted
        return replace(counts, num_requests=counts.num_received - num_ended)
