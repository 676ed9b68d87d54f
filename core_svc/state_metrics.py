"""A core's state as metrics: what engine, hub and the link to the worker know, read when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core_svc.engine import EngineCore
from core_svc.request import RequestStatus
from pagewire.engine import CoreStats
from pagewire.runtime.instruments import Instruments, Labels

WAITING_REASONS = ("queued", "preempted", "prefix", "paused")


@dataclass(slots=True)
class WorkerState:
    """The link to the worker, as the process's life keeps it."""

    is_up: bool = False
    incarnation: str = ""
    num_connects: int = 0
    num_losses: int = 0

    def connected(self, incarnation: str) -> None:
        """A worker takes plans."""
        self.is_up, self.incarnation = True, incarnation
        self.num_connects += 1

    def lost(self) -> None:
        """It is gone. A loss may be reported twice."""
        if self.is_up:
            self.is_up = False
            self.num_losses += 1


class StateMetrics:
    """Adds the readings; `engine` is set once there is one."""

    def __init__(
        self, instruments: Instruments, worker: WorkerState, target: str, num_frontends: Callable[[], int]
    ) -> None:
        """`target`: the worker's address."""
        self.engine: EngineCore | None = None
        self._worker = worker
        self._target = target
        self._instruments = instruments
        self._add_requests()
        self._add_kv_cache()
        self._add_steps()
        self._add_peers(num_frontends)

    def _stats(self) -> CoreStats:
        return CoreStats() if self.engine is None else self.engine.stats()

    def _add_requests(self) -> None:
        add = self._instruments
        name = "pagewire_core_requests_"
        add.number("gauge", name + "running", "Requests that hold a slot.", lambda: self._stats().num_running)
        add.reading(
            "gauge",
            name + "waiting",
            "Requests without a slot: new ones, preempted ones, those that wait for a prefix that another computes, "
            "and all of them in a pause.",
            self._waiting,
            ("reason",),
        )
        add.number(
            "counter",
            "pagewire_core_generated_tokens_total",
            "Tokens sampled for requests.",
            lambda: self._stats().num_generated_tokens,
            "tokens",
        )
        add.number(
            "counter",
            "pagewire_core_unknown_ids_total",
            "Aborts of requests that are not known here.",
            lambda: self._stats().num_unknown_ids,
        )

    def _add_kv_cache(self) -> None:
        add = self._instruments
        name = "pagewire_core_kv_"
        add.number("gauge", name + "blocks", "KV blocks that requests can use.", lambda: self._stats().num_total_blocks)
        add.number("gauge", name + "blocks_used", "KV blocks of requests.", lambda: self._stats().num_used_blocks)
        add.number("gauge", name + "usage_ratio", "Used share of the KV blocks, 0 to 1.", self._kv_usage, "ratio")
        add.number(
            "gauge",
            name + "block_size_tokens",
            "Tokens of a KV block.",
            lambda: 0 if self.engine is None else self.engine.config.block_size,
            "tokens",
        )
        add.number(
            "counter",
            "pagewire_core_prefix_cache_queries_tokens_total",
            "Prompt tokens looked up in the prefix cache: those of every request at its first slot.",
            lambda: self._stats().prefix_cache_queries,
            "tokens",
        )
        add.number(
            "counter",
            "pagewire_core_prefix_cache_hits_tokens_total",
            "Prompt tokens found there, whose computation was spared.",
            lambda: self._stats().prefix_cache_hits,
            "tokens",
        )

    def _add_steps(self) -> None:
        add = self._instruments
        name = "pagewire_core_"
        add.number("counter", name + "steps_total", "Steps planned.", lambda: self._stats().num_steps)
        add.number(
            "counter",
            name + "scheduled_tokens_total",
            "Tokens that steps computed.",
            lambda: self._stats().num_scheduled_tokens,
            "tokens",
        )
        add.number(
            "counter",
            name + "budget_tokens_total",
            "Tokens that those steps could have computed: the budget of each.",
            self._num_budget_tokens,
            "tokens",
        )
        add.number("gauge", name + "step_age_seconds", "Age of the step that runs; 0 between.", self._age_s, "seconds")
        add.number("gauge", name + "paused", "1 in a pause.", lambda: int(self._stats().is_paused))
        add.number("gauge", name + "sleep_level", "0: awake.", lambda: self._stats().sleep_level)
        add.number(
            "gauge", name + "epoch", "Epoch of the KV pool; a new one begins empty.", lambda: self._stats().epoch
        )

    def _add_peers(self, num_frontends: Callable[[], int]) -> None:
        add, worker = self._instruments, self._worker
        add.number("gauge", "pagewire_core_frontends", "Frontends with an open stream.", num_frontends)
        name = "pagewire_core_worker_"
        add.number("gauge", name + "up", "1 while a worker takes plans.", lambda: int(worker.is_up))
        add.number("counter", name + "connects_total", "Connections made to a worker.", lambda: worker.num_connects)
        add.number(
            "counter", name + "losses_total", "Connections to a worker that were lost.", lambda: worker.num_losses
        )
        add.info(
            name + "info",
            "The worker that takes plans.",
            ("target", "incarnation"),
            lambda: [(self._target, worker.incarnation)] if worker.is_up else [],
        )
        labels = ("model", "architecture", "dtype", "quantization", "kv_cache_dtype")
        add.info("pagewire_core_model_info", "The model that is served.", labels, self._model)

    def _model(self) -> list[Labels]:
        if self.engine is None:
            return []
        model = self.engine.model
        return [(model.model, model.architecture, model.dtype, model.quantization, model.kv_cache_dtype)]

    def _waiting(self) -> Mapping[Labels, float]:
        """Who waits, by reason. The heap is the engine thread's: its copy here is one operation of the interpreter."""
        counts = dict.fromkeys(WAITING_REASONS, 0)
        engine = self.engine
        if engine is not None:
            scheduler = engine.scheduler
            num_waiting = engine.stats().num_waiting
            waiting = [request.status for _, request in scheduler.waiting.entries()]
            preempted = min(waiting.count(RequestStatus.PREEMPTED), num_waiting)
            aside = min(scheduler.waiting.num_aside, num_waiting - preempted)
            counts.update(preempted=preempted, prefix=aside, queued=num_waiting - preempted - aside)
            if scheduler.is_paused:
                counts = {**dict.fromkeys(WAITING_REASONS, 0), "paused": num_waiting}
        return {(reason,): count for reason, count in counts.items()}

    def _kv_usage(self) -> float:
        stats = self._stats()
        return stats.num_used_blocks / stats.num_total_blocks if stats.num_total_blocks else 0.0

    def _num_budget_tokens(self) -> int:
        return 0 if self.engine is None else self._stats().num_steps * self.engine.config.max_num_batched_tokens

    def _age_s(self) -> float:
        started_ns = 0 if self.engine is None else self.engine.step_started_ns
        return max(0.0, (time.monotonic_ns() - started_ns) / 1e9) if started_ns else 0.0
