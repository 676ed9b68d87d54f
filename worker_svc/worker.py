"""The worker without its wire: one model, one KV pool, one batch, and the commands around them."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from pagewire.engine import ModelInfo
from pagewire.errors import AbortedError, FailedPreconditionError, InvalidArgumentError, PagewireError, violation
from pagewire.plan import StepPlan, StepResult
from worker_svc.batch import Batch
from worker_svc.kv_pool import allocate_pool
from worker_svc.memory import resident_bytes
from worker_svc.models.loader import LoadedModel, load_model
from worker_svc.runner import AwaitGrammarMask, ModelRunner

logger = logging.getLogger(__name__)
MAX_BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 1024, 65_536, 1 << 20

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load; empty fields mean what the model's files say."""

    model: str
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    max_model_len: int = 0
    force_generic: bool = False
    load_format: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Numbers about the worker."""

    num_steps: int
    num_slots_used: int
    resident_bytes: int
    sleep_level: int


class Worker:
    """All methods that change something belong to one compute thread; the properties and `stats` to any.

    Errors: FailedPreconditionError where the state does not allow the call (no model, asleep, wrong epoch or step),
    InvalidArgumentError for what no state would allow, InternalError for a computation that failed.
    """

    def __init__(
        self,
        device: str = "cpu",
        default_model: str = "",
        kv_cache_memory_bytes: int = 0,
        *,
        default_dtype: str = "",
        default_quantization: str = "",
        default_max_model_len: int = 0,
        num_threads: int = 0,
    ) -> None:
        """What holds where the core says nothing.

        kv_cache_memory_bytes is the pool's budget, 0 takes the default share. The type, the quantization and the
        longest sequence belong to the default model and hold only where the core leaves the model open.
        """
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise InvalidArgumentError([violation("device", device, "must be cpu, cuda or cuda:<index>")]) from error
        self._default_model = default_model
        self._default_quantization = default_quantization
        self._default_dtype, self._default_max_model_len = default_dtype, default_max_model_len
        self._kv_cache_memory_bytes = kv_cache_memory_bytes
        self._num_threads = num_threads
        self._loaded: LoadedModel | None = None
        self._load_request: LoadRequest | None = None
        self._runner: ModelRunner | None = None
        self._profiler: Any = None
        self._profile_path = ""
        self._num_steps = 0
        self._step_ended_ns = 0
        self._failed_step = 0
        self._num_other_progress = 0
        self.epoch = 0
        """Epoch of the KV pool; 0 without one. `step` is the last one executed in it."""
        self.step = 0
        self.sleep_level = 0
        self.step_started_ns = 0
        """Monotonic time at which the running step started; 0 between steps."""

    @property
    def device(self) -> str:
        return self._device.type

    @property
    def model(self) -> ModelInfo | None:
        """The model that is loaded."""
        return None if self._loaded is None else self._loaded.info

    @property
    def progress(self) -> int:
        """Changes whenever the computation gets on."""
        runner = self._runner
        return self._num_other_progress + (0 if runner is None else runner.num_progress)

    def load_model(
        self,
        model: str = "",
        *,
        revision: str = "",
        dtype: str = "",
        quantization: str = "",
        max_model_len: int = 0,
        force_generic: bool = False,
        load_format: str = "",
        on_progress: OnProgress | None = None,
    ) -> ModelInfo:
        """Loads a model (empty: the default one), or finds it loaded. Another one takes the place of the old one."""
        source = model or self._default_model
        if not source:
            raise InvalidArgumentError([violation("model", model, "must be given: the worker has no default model")])
        if not model:
            quantization = quantization or self._default_quantization
            dtype, max_model_len = dtype or self._default_dtype, max_model_len or self._default_max_model_len
        request = LoadRequest(source, revision, dtype, quantization, max_model_len, force_generic, load_format)
        if self._loaded is not None and request == self._load_request:
            self.wake_up()
            return self._loaded.info
        self._drop_cache()
        self._forget_model()
        self._load(request, on_progress)
        self.sleep_level = 0
        return self._require_model().info

    def _load(self, request: LoadRequest, on_progress: OnProgress | None) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)

        def progress(stage: str, fraction: float) -> None:
            self._num_other_progress += 1
            if on_progress is not None:
                on_progress(stage, fraction)

        started = time.monotonic()
        self._loaded = load_model(
            request.model,
            revision=request.revision,
            dtype=request.dtype,
            device=str(self._device),
            quantization=request.quantization,
            max_model_len=request.max_model_len,
            force_generic=request.force_generic,
            load_format=request.load_format,
            on_progress=progress,
        )
        self._load_request = request
        _give_memory_back()
        info = self._loaded.info
        logger.info(
            "loaded %s (%s, %s, %.0f M parameters, %.0f MiB) in %.1f s",
            info.model,
            info.architecture,
            info.dtype,
            info.num_parameters / 1e6,
            info.weights_bytes / 2**20,
            time.monotonic() - started,
        )

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by name."""
        return self._require_model().tokenizer_files

    def initialize_cache(
        self,
        *,
        epoch: int,
        block_size: int,
        num_blocks: int = 0,
        memory_bytes: int = 0,
        kv_cache_dtype: str = "",
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> tuple[int, int, str]:
        """Allocates the pool and an empty batch, and starts an epoch, whose first step is 1.

        What an earlier epoch had is gone. Returns blocks, bytes per block and the cache's type.
        """
        loaded = self._require_model()
        found = [
            violation(name, value, f"must be in [1, {high}]")
            for name, value, high in (
                ("block_size", block_size, MAX_BLOCK_SIZE),
                ("max_num_seqs", max_num_seqs, MAX_NUM_SEQS),
                ("max_num_batched_tokens", max_num_batched_tokens, MAX_NUM_BATCHED_TOKENS),
            )
            if not 1 <= value <= high
        ]
        if found:
            raise InvalidArgumentError(found)
        if epoch <= self.epoch:
            raise FailedPreconditionError(f"epoch {epoch} is not above {self.epoch}", reason="EPOCH_IN_THE_PAST")
        self._drop_cache()
        max_model_len = loaded.info.max_model_len
        pool = allocate_pool(
            loaded.model.kv_cache_specs(),
            block_size=block_size,
            num_blocks=num_blocks,
            memory_bytes=memory_bytes or self._kv_cache_memory_bytes,
            dtype=kv_cache_dtype or loaded.info.dtype,
            device=self._device,
            most_blocks=max_num_seqs * -(-max_model_len // block_size) + 1,
        )
        batch = Batch(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_kv_blocks=pool.num_blocks,
            vocab_size=loaded.model.vocab_size,
        )
        self._runner = ModelRunner(loaded.model, pool, batch)
        self.epoch, self.step, self._failed_step = epoch, 0, 0
        return pool.num_blocks, pool.bytes_per_block, pool.dtype

    def begin_stream(self) -> int:
        """A core is about to send plans, the first of which must be the step that is returned."""
        self._failed_step = 0
        return self.step + 1

    def execute(
        self,
        plan: StepPlan,
        await_grammar_mask: AwaitGrammarMask | None = None,
        on_prepared: Callable[[], None] | None = None,
    ) -> StepResult:
        """Runs a plan, which must be the next step of the epoch. A step that fails as a whole has not happened.

        on_prepared is called when the forward pass is about to begin, if there is one.
        A core may send plans before it knows how the steps before them ended. They count on those steps, so behind
        step N that failed every later step fails with AbortedError (reason EARLIER_STEP_FAILED) and has not happened
        either, until a plan comes for step N again. Any other gap is a FailedPreconditionError.
        """
        runner = self._runner
        if runner is None:
            raise FailedPreconditionError("there is no KV cache: InitializeCache comes first", reason="NO_CACHE")
        self._check_order(plan)
        self.step_started_ns = time.monotonic_ns()
        try:
            result = runner.execute(plan, await_grammar_mask, on_prepared)
            if self._step_ended_ns:
                result.timings.idle_ns = self.step_started_ns - self._step_ended_ns
            self.step, self._failed_step = plan.step, 0
            self._num_steps += 1
            return result
        except BaseException:
            self._failed_step = plan.step
            raise
        finally:
            self._step_ended_ns = time.monotonic_ns()
            self.step_started_ns = 0

    def refuse(self, epoch: int, step: int, error: PagewireError) -> NoReturn:
        """Fails a step whose plan could not be read, as `execute` fails one that can't be run."""
        if (epoch, step) == (self.epoch, self.step + 1):
            self._failed_step = step
        raise error

    def _check_order(self, plan: StepPlan) -> None:
        expected = self.step + 1
        if plan.epoch == self.epoch and self._failed_step == expected < plan.step:
            raise AbortedError(
                f"step {plan.step} was planned behind step {expected}, which failed: the worker expects step "
                f"{expected} again",
                reason="EARLIER_STEP_FAILED",
            )
        if (plan.epoch, plan.step) != (self.epoch, expected):
            raise FailedPreconditionError(
                f"the plan is step {plan.step} of epoch {plan.epoch}, the worker expects step {expected} of "
                f"epoch {self.epoch}",
                reason="STEP_OUT_OF_ORDER",
            )

    def sleep(self, level: int) -> int:
        """Drops the KV pool, and moves (level 1) or drops (level 2) the weights; returns the freed bytes.

        On a CPU level 1 has nowhere to move the weights to: they stay where they are, and only the pool is freed.
        """
        if level not in (1, 2):
            raise InvalidArgumentError([violation("sleep.level", level, "must be 1 or 2")])
        loaded = self._require_model()
        freed = self._drop_cache()
        if level == 2:
            freed += loaded.info.weights_bytes
            del loaded
            self._loaded = None
            gc.collect()
        elif self._device.type != "cpu":
            loaded.model.move_weights(torch.device("cpu"))
            freed += loaded.info.weights_bytes
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.sleep_level = level
        return freed

    def wake_up(self) -> None:
        """Brings the weights back; initialize_cache follows. Does nothing where the worker is awake."""
        if self.sleep_level == 2 and self._load_request is not None:
            self._load(self._load_request, None)
        elif self.sleep_level == 1 and self._loaded is not None and self._device.type != "cpu":
            self._loaded.model.move_weights(self._device)
        self.sleep_level = 0

    def profile(self, start: bool) -> str:
        """Starts or stops torch's profiler; returns the file that the trace is written to when it stops.

        The folder is $PAGEWIRE_PROFILE_DIR, or the system's temporary folder.
        """
        if start:
            if self._profiler is not None:
                raise FailedPreconditionError("the profiler runs already", reason="PROFILER_RUNNING")
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            folder = Path(os.environ.get("PAGEWIRE_PROFILE_DIR") or tempfile.gettempdir())
            folder.mkdir(parents=True, exist_ok=True)
            self._profile_path = str(folder / f"pagewire-worker-{os.getpid()}-{time.time_ns()}.json")
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            return self._profile_path
        if self._profiler is None:
            raise FailedPreconditionError("the profiler does not run", reason="PROFILER_NOT_RUNNING")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(self._profile_path)
        return self._profile_path

    def stats(self) -> WorkerStats:
        """Numbers about the worker."""
        runner = self._runner
        num_slots_used = 0 if runner is None else runner.batch.num_slots_used
        return WorkerStats(self._num_steps, num_slots_used, resident_bytes(), self.sleep_level)

    def _require_model(self) -> LoadedModel:
        if self._loaded is None or self.sleep_level:
            state = f"the worker sleeps at level {self.sleep_level}" if self.sleep_level else "no model is loaded"
            raise FailedPreconditionError(state, reason="ASLEEP" if self.sleep_level else "NO_MODEL")
        return self._loaded

    def _drop_cache(self) -> int:
        """Lets go of pool, batch and epoch; returns the pool's bytes."""
        freed = 0 if self._runner is None else self._runner.pool.num_bytes
        self._num_other_progress = self.progress + 1
        self._runner = None
        self._failed_step = 0
        self.epoch = self.step = 0
        return freed

    def _forget_model(self) -> None:
        """Lets go of the model before another one is loaded. Modules may hold themselves in cycles."""
        if self._loaded is not None:
            self._loaded = self._load_request = None
            gc.collect()


def _give_memory_back() -> None:
    """Hands to the system what loading took and the allocator keeps: 40 MB of 760 for SmolLM2-135M."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # GNU's C library
        trim(0)
