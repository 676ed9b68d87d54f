"""What a frontend and a core say to each other, in plain Python: the mirror of EngineRequest and StepOutputs.

The gRPC path converts these in each service's `wire.py`; the in-process path hands them over as they are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagewire.columns import EMPTY_INT32, Int32Column, UInt64Column
from pagewire.sampling import SamplingParams
from pagewire.stats import CoreDetail, DetailWanted


class FinishReason(enum.IntEnum):
    """Why a request ended. Values are those of pagewire.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    DEADLINE = 5


class AbortReason(enum.IntEnum):
    """Who ended a request early. Values are those of pagewire.v1.AbortReason."""

    UNSPECIFIED = 0
    CLIENT = 1
    DEADLINE = 2
    STOP_STRING = 3
    SHUTDOWN = 4
    SLOW_CONSUMER = 5
    ABORT_CALL = 6
    LEASE_EXPIRED = 7
    SIBLING_FAILED = 8
    PAUSE = 9


class AbortOutcome(enum.IntEnum):
    """What an abort did to one id. Values are those of pagewire.v1.AbortOutcome."""

    ABORTED = 1
    NOT_FOUND = 2
    ALREADY_FINISHED = 3


class PauseMode(enum.IntEnum):
    """How to pause. Values are those of pagewire.v1.PauseMode."""

    ABORT = 1
    WAIT = 2
    KEEP = 3


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context; an empty traceparent means not traced."""

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter (LoRA) and its version."""

    name: str
    version: int = 0


@dataclass(slots=True)
class EngineRequest:
    """A request as a core takes it. `sampling_params` is resolved: seed and max_tokens are set, n is 1."""

    request_id: int
    prompt_token_ids: Int32Column
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    output_token_ids: Int32Column = field(default_factory=lambda: EMPTY_INT32)
    child_index: int = 0
    priority: int = 0
    arrival_time_ns: int = 0
    """Wall clock."""
    remaining_ms: int | None = None
    """Time left until the deadline when the request was sent; None means no deadline."""
    cache_salt: str = ""
    adapter: Adapter | None = None
    trace_context: TraceContext | None = None
    external_request_id: str = ""


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities of consecutive positions; column 0 is the chosen token, then the likeliest in order.

    token_ids [positions, candidates] int32, logprobs same shape float32, ranks [positions] int32 (1 is the likeliest).
    """

    token_ids: Int32Column
    logprobs: npt.NDArray[np.float32]
    ranks: Int32Column

    def __len__(self) -> int:
        return len(self.ranks)

    def rows(self, start: int, stop: int | None = None) -> LogprobColumns:
        """The positions [start, stop)."""
        return LogprobColumns(self.token_ids[start:stop], self.logprobs[start:stop], self.ranks[start:stop])


@dataclass(slots=True)
class Finished:
    """How a row ended, and where its time went."""

    row: int
    reason: FinishReason
    stop_token_id: int | None = None
    abort_reason: AbortReason = AbortReason.UNSPECIFIED
    error_code: str = ""
    """Name of a gRPC status code, such as UNAVAILABLE, where reason is ERROR."""
    error_message: str = ""
    num_preemptions: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0


@dataclass(slots=True)
class StepOutputs:
    """All outputs of one step (or several merged ones) for one frontend: parallel columns over rows, sparse extras."""

    step: int
    request_ids: UInt64Column
    offsets: Int32Column
    """Place of the row's first token in the request's output."""
    num_tokens: Int32Column
    token_ids: Int32Column
    """Tokens of all rows, one row after another."""
    finished: list[Finished] = field(default_factory=list)
    logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    """By row."""
    prompt_logprobs: dict[int, tuple[int, LogprobColumns]] = field(default_factory=dict)
    """By row: first prompt position and its columns."""
    started: dict[int, int] = field(default_factory=dict)
    """By row: prompt tokens taken from the prefix cache."""
    sequence: int = 0
    stats: CoreStats | None = None


@dataclass(slots=True)
class CoreStats:
    """Numbers about a core at one moment; the mirror of pagewire.v1.CoreStats, field by field."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_scheduled_tokens: int = 0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    publish_s: float = 0.0
    num_unknown_ids: int = 0
    is_paused: bool = False
    sleep_level: int = 0
    epoch: int = 0
    num_frontends: int = 0
    detail: CoreDetail | None = None
    """Only in the answer to a GetStats that asks for it."""


# Administrative commands: the mirror of UtilityRequest's oneof. Adding one touches core.proto, this list and
# core_svc/utilities.py.


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget the prefix cache; result: number of preempted requests."""

    preempt_running: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling; result: number of aborted requests."""

    mode: PauseMode
    reset_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Schedule again; result: None."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back; result: freed bytes."""

    level: int = 1


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Load again; result: the new epoch."""


@dataclass(frozen=True, slots=True)
class GetStats:
    """Numbers; result: CoreStats, with a CoreDetail where one is asked for."""

    detail: DetailWanted | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """Start or stop profiling in the workers; result: path of the profile."""

    start: bool


Command = ResetPrefixCache | Pause | Resume | Sleep | WakeUp | GetStats | Profile
CommandResult = int | str | CoreStats | None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is and can do; the mirror of pagewire.v1.ModelInfo."""

    model: str
    architecture: str
    dtype: str
    """float32, bfloat16 or float16."""
    kv_cache_dtype: str
    tokenizer_sha256: str
    weights_id: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    revision: str = ""
    quantization: str = ""
    is_generative: bool = True
    is_pooling: bool = False
    num_parameters: int = 0
    weights_bytes: int = 0
    num_layers: int = 0
    is_native: bool = True


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a core tells a frontend at the handshake; the mirror of HandshakeResponse."""

    core_incarnation: str
    model: ModelInfo
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_requests: int
    features: tuple[str, ...] = ()
    lease_ms: int = 5000
    heartbeat_interval_ms: int = 1000
