"""What the services tell of themselves for a live view, in plain Python: the mirror of ProcessStats, CoreDetail, ...

Field by field as in pagewire.v1, where the comments are; columns are numpy arrays. `pagewire.stats_wire` converts them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from pagewire.columns import EMPTY_INT32, Int32Column, UInt64Column

MAX_REQUESTS, MAX_STEPS, MAX_BLOCKS = 1024, 64, 16384
"""Bounds of what a core tells in one answer."""


class RequestState(enum.IntEnum):
    """Values are those of pagewire.v1.RequestState."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3


class BlockState(enum.IntEnum):
    """Values are those of pagewire.v1.BlockState."""

    FREE = 1
    CACHED = 2
    USED = 3
    SHARED = 4


def _int32() -> Int32Column:
    return EMPTY_INT32


def _uint64() -> UInt64Column:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """A process."""

    incarnation: str = ""
    pid: int = 0
    uptime_ms: int = 0
    resident_bytes: int = 0
    cpu_ms: int = 0
    version: str = ""


@dataclass(slots=True)
class RequestColumns:
    """Live requests of a core: those that run in the order in which they are served, then those that wait."""

    num_total: int = 0
    external_request_ids: list[str] = field(default_factory=list)
    request_ids: UInt64Column = field(default_factory=_uint64)
    child_indices: Int32Column = field(default_factory=_int32)
    states: Int32Column = field(default_factory=_int32)
    priorities: Int32Column = field(default_factory=_int32)
    ages_ms: UInt64Column = field(default_factory=_uint64)
    num_prompt_tokens: Int32Column = field(default_factory=_int32)
    num_output_tokens: Int32Column = field(default_factory=_int32)
    num_draft_tokens: Int32Column = field(default_factory=_int32)
    num_placeholder_tokens: Int32Column = field(default_factory=_int32)
    num_computed_tokens: Int32Column = field(default_factory=_int32)
    max_num_tokens: Int32Column = field(default_factory=_int32)
    num_cached_tokens: Int32Column = field(default_factory=_int32)
    num_blocks: Int32Column = field(default_factory=_int32)
    num_preemptions: Int32Column = field(default_factory=_int32)

    @property
    def debts(self) -> Int32Column:
        """Tokens that each still owes: what the next steps have to compute of what is known of it."""
        known = self.num_prompt_tokens + self.num_output_tokens + self.num_draft_tokens + self.num_placeholder_tokens
        return known - self.num_computed_tokens


@dataclass(slots=True)
class StepColumns:
    """A core's last steps, oldest first."""

    numbers: UInt64Column = field(default_factory=_uint64)
    ages_us: UInt64Column = field(default_factory=_uint64)
    num_requests: Int32Column = field(default_factory=_int32)
    num_scheduled_tokens: Int32Column = field(default_factory=_int32)
    num_prefill_tokens: Int32Column = field(default_factory=_int32)
    num_sampled_tokens: Int32Column = field(default_factory=_int32)
    schedule_us: Int32Column = field(default_factory=_int32)
    execute_us: Int32Column = field(default_factory=_int32)
    update_us: Int32Column = field(default_factory=_int32)
    publish_us: Int32Column = field(default_factory=_int32)
    prepare_us: Int32Column = field(default_factory=_int32)
    forward_us: Int32Column = field(default_factory=_int32)
    sample_us: Int32Column = field(default_factory=_int32)
    is_failed: Int32Column = field(default_factory=_int32)


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """A core's KV pool: a byte per block, a BlockState, of every `stride`-th block."""

    num_blocks: int = 0
    stride: int = 0
    states: bytes = b""


@dataclass(slots=True)
class CoreDetail:
    """A core at one moment."""

    process: ProcessStats = field(default_factory=ProcessStats)
    model: str = ""
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    worker_target: str = ""
    unavailable: str = ""
    step_age_ms: int = 0
    is_partial: bool = False
    requests: RequestColumns = field(default_factory=RequestColumns)
    steps: StepColumns = field(default_factory=StepColumns)
    blocks: BlockColumns = field(default_factory=BlockColumns)
    snapshot_age_ms: int = 0


@dataclass(frozen=True, slots=True)
class DetailWanted:
    """How much of a CoreDetail is asked for; 0 leaves a part out."""

    max_requests: int = 0
    max_steps: int = 0
    max_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CoreConnection:
    """One core, as a frontend sees it."""

    target: str = ""
    is_connected: bool = False
    core_incarnation: str = ""
    model: str = ""
    num_requests: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class FrontendStats:
    """A frontend at one moment."""

    process: ProcessStats = field(default_factory=ProcessStats)
    cores: tuple[CoreConnection, ...] = ()
    num_requests: int = 0
    num_received: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker at one moment."""

    num_steps: int = 0
    num_slots_used: int = 0
    resident_bytes: int = 0
    sleep_level: int = 0
    process: ProcessStats = field(default_factory=ProcessStats)
    core_incarnation: str = ""
    is_stream_open: bool = False
    epoch: int = 0
    step: int = 0
    step_age_ms: int = 0
    device: str = ""
    model: str = ""
