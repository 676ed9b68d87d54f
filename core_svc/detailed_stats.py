"""The answer to GetStats with a detail: the engine's part, made between its steps, and what the edge knows by itself.

A live view must not wait for a step that hangs: after ANSWER_WITHIN_S it gets what the edge knows, and what the engine
answered last.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

from core_svc.engine import EngineCore
from core_svc.recent_steps import RecentSteps
from core_svc.watchdog import step_age_ms
from pagewire.engine import CommandResult, CoreStats, EngineInfo, GetStats
from pagewire.runtime.process_stats import process_stats
from pagewire.stats import BlockColumns, CoreDetail, DetailWanted, RequestColumns

ANSWER_WITHIN_S = 0.5


@dataclass(slots=True)
class DetailedStats:
    """Answers for one engine; belongs to the event loop."""

    engine: EngineCore
    info: EngineInfo
    recent_steps: RecentSteps | None = None
    worker_target: str = ""
    _asked: Future[CommandResult] | None = None
    """The question that the engine has not answered: no further one is put behind it."""
    _last: tuple[DetailWanted, CoreDetail, int] | None = None
    """What the engine answered last, to which question, and when (monotonic nanoseconds)."""

    async def answer(self, wanted: DetailWanted, unavailable: str) -> CoreStats:
        """Counters and detail; the detail is_partial where the engine is in a long step. Raises PagewireError."""
        stats = await self._ask_engine(wanted)
        is_partial = stats is None or stats.detail is None
        stats = stats or self.engine.stats()
        told, age_ms = (stats.detail, 0) if stats.detail is not None else self._earlier(wanted, stats)
        detail = replace(
            told,
            process=process_stats(self.info.core_incarnation),
            model=self.info.model.model,
            block_size=self.info.block_size,
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            worker_target=self.worker_target,
            unavailable=unavailable,
            step_age_ms=step_age_ms(time.monotonic_ns(), self.engine.step_started_ns),
            is_partial=is_partial,
            snapshot_age_ms=age_ms,
        )
        if self.recent_steps is not None:
            detail.steps = self.recent_steps.columns(wanted.max_steps)
        return replace(stats, detail=detail)

    async def _ask_engine(self, wanted: DetailWanted) -> CoreStats | None:
        """None where it does not answer in time; what it answers later is for whoever asks next."""
        if self._asked is not None and not self._asked.done():
            return None
        asked = self._asked = self.engine.utility(GetStats(wanted))
        asked.add_done_callback(lambda done: self._keep(wanted, done))
        answered = asyncio.wrap_future(asked)
        # Its error is told by the one below, or to nobody.
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([answered], timeout=ANSWER_WITHIN_S)
        if not asked.done():
            return None
        stats = asked.result()
        return stats if isinstance(stats, CoreStats) else None

    def _keep(self, wanted: DetailWanted, done: Future[CommandResult]) -> None:
        """On the engine's thread: one assignment, which no reader sees half of."""
        if done.cancelled() or done.exception() is not None:
            return
        stats = done.result()
        if isinstance(stats, CoreStats) and stats.detail is not None:
            self._last = (wanted, stats.detail, time.monotonic_ns())

    def _earlier(self, wanted: DetailWanted, stats: CoreStats) -> tuple[CoreDetail, int]:
        """The last answer to the same question, and its age in milliseconds; without one, how many there are."""
        last = self._last
        if last is not None and last[0] == wanted:
            return last[1], (time.monotonic_ns() - last[2]) // 1_000_000
        num_requests = stats.num_running + stats.num_waiting
        return CoreDetail(
            requests=RequestColumns(num_total=num_requests), blocks=BlockColumns(stats.num_total_blocks)
        ), 0
