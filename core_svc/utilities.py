"""The administrative commands, one function each, run on the engine thread between steps."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from core_svc.executor import CacheSpec
from core_svc.inbox import Utility, reject, resolve
from core_svc.live_view import detail_of
from core_svc.scheduler import PauseState
from pagewire.engine import (
    AbortReason,
    CommandResult,
    GetStats,
    Pause,
    PauseMode,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from pagewire.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PagewireError,
    violation,
)

if TYPE_CHECKING:
    from core_svc.engine import EngineCore

logger = logging.getLogger(__name__)

SLEEP_LEVELS = (1, 2)


class Utilities:
    """Runs commands and keeps the answers that have to wait."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._waiting_pauses: list[tuple[Pause, Future[CommandResult]]] = []

    def run(self, message: Utility) -> None:
        """Runs a command and answers it; errors go into the answer and harm nobody else."""
        try:
            if isinstance(message.command, Pause) and message.command.mode is PauseMode.WAIT:
                self._engine.scheduler.pause_state = PauseState.NO_ADMISSION
                self._waiting_pauses.append((message.command, message.future))
                self.answer_pauses()
                return
            resolve(message.future, self._dispatch(message))
        except PagewireError as error:
            reject(message.future, error)
        except Exception:
            # Whoever waits for the answer must get one; the loop goes on.
            logger.exception("%s failed", type(message.command).__name__)
            reject(message.future, InternalError(f"{type(message.command).__name__} failed"))

    def answer_pauses(self) -> None:
        """Answers the pauses that waited for running requests, once there are none. Called in every step.

        A request that was preempted meanwhile runs again first; in sleep nothing does, and the pause has its way.
        """
        if not self._waiting_pauses:
            return
        scheduler = self._engine.scheduler
        if scheduler.num_running or (scheduler.has_started_requests and not self._engine.sleep_level):
            return
        pauses, self._waiting_pauses = self._waiting_pauses, []
        for command, future in pauses:
            if command.reset_prefix_cache:
                self._engine.scheduler.kv.reset_prefix_cache()
            resolve(future, 0)

    def cancel_pauses(self, error: PagewireError) -> None:
        """Answers the pauses that wait with an error: what they wait for will not come."""
        pauses, self._waiting_pauses = self._waiting_pauses, []
        for _, future in pauses:
            reject(future, error)

    def _dispatch(self, message: Utility) -> CommandResult:
        match message.command:
            case ResetPrefixCache(preempt_running):
                return self._reset_prefix_cache(preempt_running)
            case Pause(mode, reset_prefix_cache):
                return self._pause(mode, reset_prefix_cache)
            case Resume():
                self.cancel_pauses(AbortedError("resumed before the running requests had finished"))
                self._engine.scheduler.pause_state = PauseState.UNPAUSED
                return None
            case Sleep(level):
                return self._sleep(level)
            case WakeUp():
                return self._wake_up()
            case GetStats(detail):
                stats = self._engine.stats()
                return stats if detail is None else replace(stats, detail=detail_of(self._engine.scheduler, detail))
            case Profile(start):
                return self._engine.call_executor(lambda executor: executor.profile(start))

    def _reset_prefix_cache(self, preempt_running: bool) -> int:
        scheduler = self._engine.scheduler
        num_preempted = scheduler.preempt_all() if preempt_running else 0
        if not scheduler.kv.reset_prefix_cache():
            num_used = scheduler.kv.pool.num_used_blocks
            raise FailedPreconditionError(f"{num_used} KV blocks are in use; set preempt_running to take them back")
        return num_preempted

    def _pause(self, mode: PauseMode, reset_prefix_cache: bool) -> int:
        """Freezes everything where it is; with ABORT nothing is left to freeze."""
        if mode not in (PauseMode.ABORT, PauseMode.KEEP):
            raise InvalidArgumentError([violation("pause.mode", mode, "must be abort, wait or keep")])
        self.cancel_pauses(AbortedError("another pause came before the running requests had finished"))
        num_aborted = self._engine.abort_all(AbortReason.PAUSE) if mode is PauseMode.ABORT else 0
        self._engine.scheduler.pause_state = PauseState.FROZEN
        if reset_prefix_cache:
            self._reset_prefix_cache(preempt_running=True)
        return num_aborted

    def _sleep(self, level: int) -> int:
        """Preempts all, forgets the cache, and lets the worker give its memory back; freed bytes."""
        engine = self._engine
        if level not in SLEEP_LEVELS:
            raise InvalidArgumentError([violation("sleep.level", level, "must be 1 or 2")])
        if engine.sleep_level >= level:
            return 0
        engine.scheduler.preempt_all()
        engine.scheduler.kv.reset_prefix_cache()
        freed_bytes = engine.call_executor(lambda executor: executor.sleep(level))
        engine.sleep_level = level
        return freed_bytes

    def _wake_up(self) -> int:
        """Loads the weights again and goes on with an empty pool under a new epoch, which is the answer."""
        engine = self._engine
        if engine.sleep_level:
            engine.call_executor(lambda executor: executor.wake_up())
            spec, epoch = self._cache_spec(), engine.epoch + 1
            cache = engine.call_executor(lambda executor: executor.initialize_cache(spec, epoch))
            engine.start_epoch(cache, epoch)
            engine.sleep_level = 0
        return engine.epoch

    def _cache_spec(self) -> CacheSpec:
        """The pool that the engine has, to be made again."""
        config, cache = self._engine.config, self._engine.cache
        return CacheSpec(
            block_size=config.block_size,
            num_blocks=cache.num_blocks,
            kv_cache_dtype=cache.kv_cache_dtype,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
