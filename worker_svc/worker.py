"""The worker without its wire: one model, one KV pool, one batch, and the commands around them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from pagewire.engine import ModelInfo
from pagewire.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PagewireError,
    violation,
)
from pagewire.plan import StepPlan, StepResult
from pagewire.stats import WorkerStats
from worker_svc.batch import Batch
from worker_svc.compute import Deferred
from worker_svc.device_failure import DeviceLostError
from worker_svc.kv_pool import allocate_pool, cache_dtype, check_sizes
from worker_svc.load_request import LoadRequest, OnProgress
from worker_svc.memory import device_named, give_memory_back
from worker_svc.models.kv_scales import warn_without_scales
from worker_svc.models.loader import LoadedModel
from worker_svc.profile_run import cuda_kv_budget_bytes
from worker_svc.profiler import Profiler
from worker_svc.runner import AwaitGrammarMask, ModelRunner


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
        gpu_memory_utilization: float = 0.9,
        cuda_graphs: bool = True,
    ) -> None:
        """What holds where the core says nothing.

        kv_cache_memory_bytes is the pool's budget, 0 takes the default share. The type, the quantization and the
        longest sequence belong to the default model and hold only where the core leaves the model open.
        """
        self._device = device_named(device)
        if not 0.0 < gpu_memory_utilization <= 1.0:
            raise InvalidArgumentError(
                [violation("gpu_memory_utilization", gpu_memory_utilization, "must be in (0, 1]")]
            )
        self._gpu_memory_utilization, self._cuda_graphs = gpu_memory_utilization, cuda_graphs
        self._default_model, self._default_quantization = default_model, default_quantization
        self._default_dtype, self._default_max_model_len = default_dtype, default_max_model_len
        self._kv_cache_memory_bytes, self._num_threads = kv_cache_memory_bytes, num_threads
        self._loaded: LoadedModel | None = None
        self._load_request: LoadRequest | None = None
        self._runner: ModelRunner | None = None
        self._profiler = Profiler(self._device)
        self._num_steps = self._step_ended_ns = self._failed_step = self._num_other_progress = 0
        self._device_error = ""
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

    @property
    def kv_pool_bytes(self) -> int:
        runner = self._runner
        return 0 if runner is None else runner.pool.num_bytes

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
        self._require_device()
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

        self._loaded, self._load_request = request.load(self._device, progress), request

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
        self._require_device()
        check_sizes(block_size, max_num_seqs, max_num_batched_tokens)
        dtype = kv_cache_dtype or loaded.info.dtype
        element_type = cache_dtype(dtype, self._device)
        if epoch <= self.epoch:
            raise FailedPreconditionError(f"epoch {epoch} is not above {self.epoch}", reason="EPOCH_IN_THE_PAST")
        self._drop_cache()
        give_memory_back()  # what torch keeps of an old pool does not count as free
        max_model_len = loaded.info.max_model_len
        memory_bytes = memory_bytes or self._kv_cache_memory_bytes
        if self._device.type == "cuda" and not num_blocks and not memory_bytes:
            memory_bytes = cuda_kv_budget_bytes(
                loaded.model,
                utilization=self._gpu_memory_utilization,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                block_size=block_size,
                kv_dtype=element_type,
            )
        pool = allocate_pool(
            loaded.model.kv_cache_specs(),
            block_size=block_size,
            num_blocks=num_blocks,
            memory_bytes=memory_bytes,
            dtype=dtype,
            device=self._device,
            most_blocks=max_num_seqs * -(-max_model_len // block_size) + 1,
        )
        warn_without_scales(loaded.model, element_type)
        batch = Batch(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_kv_blocks=pool.num_blocks,
            vocab_size=loaded.model.vocab_size,
        )
        self._runner = ModelRunner(loaded.model, pool, batch, cuda_graphs=self._cuda_graphs)
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
        """See `start`; waits for the result."""
        started = self.start(plan, await_grammar_mask, on_prepared)
        return started.finish() if isinstance(started, Deferred) else started

    def start(
        self,
        plan: StepPlan,
        await_grammar_mask: AwaitGrammarMask | None = None,
        on_prepared: Callable[[], None] | None = None,
    ) -> StepResult | Deferred[StepResult]:
        """Runs a plan, which must be the next step of the epoch. A step that fails as a whole has not happened.

        on_prepared is called when the forward pass is about to begin, if there is one, or has been launched on a GPU.
        There the result may be Deferred, so that the next step can be launched before this one is waited for.
        A core may send plans before it knows how the steps before them ended. They count on those steps, so behind
        step N that failed every later step fails with AbortedError (reason EARLIER_STEP_FAILED) and has not happened
        either, until a plan comes for step N again. Any other gap is a FailedPreconditionError.
        """
        runner = self._runner
        if runner is None:
            raise FailedPreconditionError("there is no KV cache: InitializeCache comes first", reason="NO_CACHE")
        self._require_device()
        self._check_order(plan)
        is_idle = self._step_ended_ns and not self.step_started_ns
        self.step_started_ns = started_ns = time.monotonic_ns()
        idle_ns = started_ns - self._step_ended_ns if is_idle else 0
        try:
            started = runner.start(plan, await_grammar_mask, on_prepared)
        except BaseException as error:
            if isinstance(error, DeviceLostError):
                self._device_error = error.message
            self._failed_step = plan.step
            self._end_step(started_ns)
            raise
        self.step, self._failed_step = plan.step, 0
        self._num_steps += 1
        if not isinstance(started, Deferred):
            started.timings.idle_ns = idle_ns
            self._end_step(started_ns)
            return started

        def finish() -> StepResult:
            try:
                result = started.finish()
                result.timings.idle_ns = idle_ns
                return result
            except Exception as error:  # of a device that has failed: nothing else is left to raise
                lost = error if isinstance(error, DeviceLostError) else DeviceLostError(error)
                self._device_error = lost.message
                raise lost from error
            finally:
                self._end_step(started_ns)

        return Deferred(finish, started.is_ready)

    def _end_step(self, started_ns: int) -> None:
        """A step has ended; the next one may have been launched already."""
        self._step_ended_ns = time.monotonic_ns()
        if self.step_started_ns == started_ns:
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
        give_memory_back()
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
        """Starts or stops torch's profiler; returns the file that the trace is written to when it stops."""
        return self._profiler.start() if start else self._profiler.stop()

    def stats(self) -> WorkerStats:
        """What only the worker knows; its servicer fills in the rest."""
        runner = self._runner
        num_slots_used = 0 if runner is None else runner.batch.num_slots_used
        return WorkerStats(self._num_steps, num_slots_used, 0, self.sleep_level, epoch=self.epoch, step=self.step)

    def _require_device(self) -> None:
        if self._device_error:
            raise InternalError(
                f"the worker must be started again: {self._device_error}", reason=DeviceLostError.reason
            )

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
