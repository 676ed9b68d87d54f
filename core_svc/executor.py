"""The core's view of its workers: an interface that the gRPC client, the in-process worker and the fake implement."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from pagewire.engine import ModelInfo
from pagewire.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to load; the mirror of LoadModelRequest. Empty fields mean the worker's own choice."""

    model: str = ""
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    max_model_len: int = 0
    force_generic: bool = False
    load_format: str = ""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """How to make the KV pool; the mirror of InitializeCacheRequest. Zero means the worker's own choice."""

    block_size: int = 16
    num_blocks: int = 0
    memory_bytes: int = 0
    kv_cache_dtype: str = ""
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The pool that was made. `num_blocks` counts the null block 0."""

    num_blocks: int
    bytes_per_block: int = 0
    kv_cache_dtype: str = "float32"


class Executor(Protocol):
    """Runs plans. All calls come from the core's one engine thread (load_model from its start-up).

    Errors: UnavailableError where the worker is gone, FailedPreconditionError where it refuses the epoch or step.
    """

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        """Loads the model, or finds it loaded."""
        ...

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by name (tokenizer.json, tokenizer_config.json, chat_template.jinja, ...)."""
        ...

    def initialize_cache(self, spec: CacheSpec, epoch: int) -> CacheInfo:
        """Allocates the KV pool and starts an epoch; the next plan is its step 1."""
        ...

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Hands over a plan and returns; two may be pending. Results come in the order of plans.

        A plan behind one that failed as a whole fails too, with AbortedError: neither has happened.
        """
        ...

    def sleep(self, level: int) -> int:
        """Gives memory back, the KV pool too; returns the freed bytes."""
        ...

    def wake_up(self) -> None:
        """Loads the weights again; initialize_cache follows."""
        ...

    def profile(self, start: bool) -> str:
        """Starts or stops profiling; returns where the profile is written."""
        ...

    def shutdown(self) -> None:
        """Lets go of the worker. Idempotent."""
        ...
