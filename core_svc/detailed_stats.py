"""The answer to GetStats with a detail: the engine's part, made between its steps, and what the edge knows by itself.

A live view must not wait for a step that hangs: after ANSWER_WITHIN_S it gets what there is without the engine.
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

    async def answer(self, wanted: DetailWanted, unavailable: str) -> CoreStats:
        """Counters and detail; the detail is_partial where the engine is in a long step. Raises PagewireError."""
        stats = await self._ask_engine(wanted)
        is_partial = stats is None
        stats = stats or self.engine.stats()
        told = stats.detail or CoreDetail(
            requests=RequestColumns(num_total=stats.num_running + stats.num_waiting),
            blocks=BlockColumns(stats.num_total_blocks),
        )
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
        )
        if self.recent_steps is not None:
            detail.steps = self.recent_steps.columns(wanted.max_steps)
        return replace(stats, detail=detail)

    async def _ask_engine(self, wanted: DetailWanted) -> CoreStats | None:
        if self._asked is not None and not self._asked.done():
            return None
        self._asked = self.engine.utility(GetStats(wanted))
        await asyncio.wait([asyncio.wrap_future(self._asked)], timeout=ANSWER_WITHIN_S)
        if not self._asked.done():
            return None
        stats = self._asked.result()
        return stats if isinstance(stats, CoreStats) else None
