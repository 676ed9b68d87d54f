"""What a core and a worker say to each other, in plain Python: the mirror of worker.proto's StepPlan and StepResult.

All columns are int32 over rows; row i of one belongs to row i of the others. The gRPC path converts these in
`core_svc/wire.py` and `worker_svc/wire.py`; the in-process path hands them over as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.columns import EMPTY_INT32, Int32Column
from pagewire.engine import Adapter, LogprobColumns, TraceContext
from pagewire.sampling import SamplingParams


def _empty() -> Int32Column:
    return EMPTY_INT32


@dataclass(slots=True)
class NewRequest:
    """A request that takes a slot: a new one, or a preempted one that comes back with all its tokens."""

    slot: int
    frontend_incarnation: str
    request_id: int
    token_ids: Int32Column
    """All tokens known, prompt and output."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    child_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """Masked until min_tokens are there; empty with ignore_eos."""
    adapter: Adapter | None = None
    prompt_logprobs_start: int = 1
    """First prompt position whose logprobs are still wanted, where prompt_logprobs is set."""
    trace_context: TraceContext | None = None


@dataclass(slots=True)
class StepPlan:
    """One step as a difference to the worker's batch.

    Applied in this order: released slots, block copies, blocks to zero, new requests, rows. A worker samples
    `num_sampled_tokens[i]` tokens at the last so many positions of row i (0: the chunk does not reach the end of what
    is known) and appends them to the slot's tokens itself, so a decode row carries no token ids.
    """

    epoch: int
    step: int
    slots: Int32Column
    num_scheduled_tokens: Int32Column
    num_computed_tokens: Int32Column
    num_sampled_tokens: Int32Column
    num_new_blocks: Int32Column
    new_block_ids: Int32Column
    released_slots: Int32Column = field(default_factory=_empty)
    new_requests: list[NewRequest] = field(default_factory=list)
    num_draft_tokens: Int32Column = field(default_factory=_empty)
    draft_token_ids: Int32Column = field(default_factory=_empty)
    copy_sources: Int32Column = field(default_factory=_empty)
    copy_destinations: Int32Column = field(default_factory=_empty)
    zero_block_ids: Int32Column = field(default_factory=_empty)
    awaits_grammar_mask: bool = False
    trace_context: TraceContext | None = None
    num_drafts_wanted: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


@dataclass(slots=True)
class GrammarMask:
    """Which tokens the grammars allow at the sampled positions of a step; the mirror of worker.proto's GrammarMask."""

    epoch: int
    step: int
    slots: Int32Column
    """Slots that have a grammar."""
    num_mask_rows: Int32Column
    """Mask rows per slot: as many as the slot's row samples."""
    mask: Int32Column
    """Bit masks, ceil(vocabulary / 32) words per mask row, bit 0 of word 0 is token 0."""


@dataclass(slots=True)
class Timings:
    """Where a step's time went on the worker, in nanoseconds."""

    wait_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0


@dataclass(slots=True)
class StepResult:
    """What came out of a step, in the worker's own order of rows; find rows by slot."""

    epoch: int
    step: int
    slots: Int32Column
    """Slots that sampled."""
    num_tokens: Int32Column
    token_ids: Int32Column
    logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    """By slot, one position per token that came out."""
    prompt_logprobs: dict[int, tuple[int, LogprobColumns]] = field(default_factory=dict)
    """By slot: first prompt position (at least 1) and its columns; also for chunks that sampled nothing."""
    errors: dict[int, str] = field(default_factory=dict)
    """By slot: a row that failed by itself."""
    num_draft_tokens: Int32Column = field(default_factory=_empty)
    draft_token_ids: Int32Column = field(default_factory=_empty)
    timings: Timings = field(default_factory=Timings)
