"""A worker's metrics: its steps as they leave, and what it holds, read when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewire.engine import ModelInfo
from pagewire.plan import StepResult
from pagewire.runtime.instruments import STEP_SECONDS, Instruments, Labels

if TYPE_CHECKING:
    from worker_svc.execute_session import Outgoing
    from worker_svc.worker import Worker

PHASES = ("wait", "prepare", "forward", "sample", "idle")


class StepMetrics:
    """Counts what an Execute stream sends; on the event loop."""

    def __init__(self, instruments: Instruments) -> None:
        self._step_s = instruments.histogram(
            "pagewire_worker_step_duration_seconds",
            "Parts of a step: waiting for its turn, preparing, the model, sampling; idle: since the step before ended.",
            STEP_SECONDS,
            ("phase",),
            preset=[(phase,) for phase in PHASES],
        )
        self._failures = instruments.counter(
            "pagewire_worker_step_failures_total",
            "Steps that failed as a whole, by gRPC code.",
            ("code",),
            preset=[("INTERNAL",), ("INVALID_ARGUMENT",), ("ABORTED",)],
        )

    def count(self, item: Outgoing) -> None:
        """A result, a failure, or what is neither."""
        if isinstance(item, StepResult):
            for phase in PHASES:
                self._step_s.observe(getattr(item.timings, f"{phase}_ns") / 1e9, (phase,))
        elif (error := getattr(item, "error", None)) is not None:
            self._failures.add(1, (error.code,))


def add_worker_state(
    instruments: Instruments, worker: Worker, has_core: Callable[[], bool], memory: Callable[[], tuple[int, int]]
) -> None:
    """Adds the readings. `worker` answers from any thread; `memory`: available and used bytes of its device."""
    name, number = "pagewire_worker_", instruments.number
    number("counter", name + "steps_total", "Steps that ended well.", lambda: worker.stats().num_steps)
    number("gauge", name + "slots_used", "Slots that hold a request.", lambda: worker.stats().num_slots_used)
    number("gauge", name + "kv_pool_bytes", "Memory of the KV pool.", lambda: worker.kv_pool_bytes, "bytes")
    number(
        "gauge", name + "weights_bytes", "Memory of the weights.", lambda: _of(worker.model, "weights_bytes"), "bytes"
    )
    number("gauge", name + "sleep_level", "0: awake.", lambda: worker.sleep_level)
    number("gauge", name + "epoch", "Epoch of the KV pool; 0 without one.", lambda: worker.epoch)
    number("gauge", name + "core_connected", "1 while a core's Execute stream is open.", lambda: int(has_core()))
    age = "Age of the step that runs; 0 between."
    number("gauge", name + "step_age_seconds", age, lambda: _age_s(worker), "seconds")
    instruments.reading(
        "gauge",
        name + "device_memory_bytes",
        "Memory of the device that computes: still to be had, and of this process.",
        lambda: _memory(worker.device, *memory()),
        ("device", "kind"),
        "bytes",
    )
    labels = ("model", "architecture", "dtype", "quantization", "kv_cache_dtype")
    instruments.info(name + "model_info", "The model that is loaded.", labels, lambda: _model(worker.model))


def _of(model: ModelInfo | None, field: str) -> int:
    return 0 if model is None else int(getattr(model, field))


def _age_s(worker: Worker) -> float:
    started_ns = worker.step_started_ns
    return max(0.0, (time.monotonic_ns() - started_ns) / 1e9) if started_ns else 0.0


def _memory(device: str, available: int, used: int) -> dict[Labels, float]:
    return {(device, "available"): available, (device, "used"): used}


def _model(model: ModelInfo | None) -> list[Labels]:
    if model is None:
        return []
    return [(model.model, model.architecture, model.dtype, model.quantization, model.kv_cache_dtype)]
