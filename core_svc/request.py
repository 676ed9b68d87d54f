"""The core's state of one request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from core_svc.block_hash import request_extra_keys
from core_svc.block_pool import KVCacheBlock
from pagewire.columns import Int32Column
from pagewire.engine import Adapter, EngineRequest, Finished, FinishReason, TraceContext
from pagewire.plan import NewRequest
from pagewire.sampling import SamplingParams

if TYPE_CHECKING:
    from core_svc.slot_table import SlotTable

RequestKey = tuple[str, int]
"""(frontend incarnation, request id): what a request is called inside the core."""

NO_SLOT = -1


class RequestStatus(enum.IntEnum):
    """Where a request is; everything from FINISHED_STOPPED on is terminal."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6
    FINISHED_DEADLINE = 7

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason:
        """What the frontend is told. Raises KeyError for a request that is alive."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_DEADLINE: FinishReason.DEADLINE,
}


@dataclass(slots=True, eq=False)
class Request:
    """Tokens, progress and blocks of one request. Made by `Request.from_engine_request`.

    It owes num_tokens + len(spec_token_ids) + num_output_placeholders - num_computed_tokens. While it holds a slot,
    what changes with every step is in the slot table, and the properties of those names look it up there.
    """

    key: RequestKey
    sampling_params: SamplingParams
    held_token_ids: Int32Column
    """Prompt and output while the request has no slot."""
    num_prompt_tokens: int
    max_num_tokens: int
    """Prompt and output at most, from max_tokens and the model's length."""
    order: tuple[int, int, int]
    """Place among all requests; smaller is served first and preempted last."""
    queued_ns: int
    """Monotonic, as all times here."""
    eos_token_ids: frozenset[int] = frozenset()
    """Empty with ignore_eos."""
    stop_token_ids: frozenset[int] = frozenset()
    child_index: int = 0
    adapter: Adapter | None = None
    trace_context: TraceContext | None = None
    extra_keys: bytes = b""
    logprob_width: int = 0
    """Candidates per sampled token; 0 where none are wanted."""
    prompt_logprob_width: int = 0
    """Candidates per prompt position; 0 where none are wanted."""
    deadline_ns: int | None = None
    priority: int = 0
    external_request_id: str = ""
    """What its caller calls it: for logs and live views alone."""

    status: RequestStatus = RequestStatus.WAITING
    slot: int = NO_SLOT
    table: SlotTable | None = None
    """Where the slot is; None without one."""
    held_num_computed_tokens: int = 0
    """Computed tokens while the request has no slot: those at its end."""
    spec_token_ids: list[int] = field(default_factory=list)
    """Drafts to verify in the next step."""
    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_cached_blocks: int = 0
    """Blocks, from the first on, that have a hash."""
    num_announced_blocks: int = 0
    """Blocks whose hashes others were told to wait for, see KVCacheManager."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of full blocks; grows as it is asked for and outlives preemption."""
    next_prompt_logprob: int = 1
    """First prompt position whose logprobs were not delivered."""
    num_preemptions: int = 0
    is_started: bool = False
    """It was scheduled once, and its frontend was told."""
    num_hit_tokens: int = 0
    """Prompt tokens from the prefix cache at the first admission."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished: Finished | None = None
    """How it ended, once it has."""

    @classmethod
    def from_engine_request(
        cls,
        request: EngineRequest,
        frontend_incarnation: str,
        *,
        max_model_len: int,
        vocab_size: int = 0,
        sequence: int,
        now_ns: int,
        is_priority_policy: bool = False,
    ) -> Request:
        """Takes over what a frontend sent. `sequence` counts arrivals at this core."""
        params = request.sampling_params
        token_ids = np.array(request.prompt_token_ids, np.int32)
        if len(request.output_token_ids):
            token_ids = np.concatenate((token_ids, request.output_token_ids), dtype=np.int32)
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        return cls(
            key=(frontend_incarnation, request.request_id),
            sampling_params=params,
            held_token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=min(num_prompt_tokens + max_tokens, max_model_len),
            order=(request.priority, request.arrival_time_ns, sequence) if is_priority_policy else (0, 0, sequence),
            queued_ns=now_ns,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset(request.eos_token_ids),
            stop_token_ids=frozenset(params.stop_token_ids),
            child_index=request.child_index,
            adapter=request.adapter,
            trace_context=request.trace_context,
            extra_keys=request_extra_keys(request.adapter, request.cache_salt),
            logprob_width=params.logprob_width(vocab_size),
            prompt_logprob_width=params.prompt_logprob_width(vocab_size),
            deadline_ns=None if request.remaining_ms is None else now_ns + request.remaining_ms * 1_000_000,
            priority=request.priority,
            external_request_id=request.external_request_id,
        )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprob_width or self.prompt_logprob_width)

    @property
    def token_ids(self) -> Int32Column:
        """Prompt and output; a view."""
        if self.table is None:
            return self.held_token_ids
        return self.table.token_ids[self.slot, : self.table.num_tokens[self.slot]]

    @property
    def num_tokens(self) -> int:
        return len(self.held_token_ids) if self.table is None else int(self.table.num_tokens[self.slot])

    @property
    def num_computed_tokens(self) -> int:
        """Positions with KV, counting those scheduled in steps that still run."""
        held = self.held_num_computed_tokens
        return held if self.table is None else int(self.table.num_computed_tokens[self.slot])

    @property
    def num_output_placeholders(self) -> int:
        """Most tokens that steps in flight will append; 0 between steps that don't overlap."""
        return 0 if self.table is None else self.table.placeholders(self.slot)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_num_cached_tokens(self) -> int:
        """Most tokens whose KV may come from the prefix cache.

        Never the last one (something must be computed to sample from), and none whose computation still has to give
        the logprobs of the prompt position after it.
        """
        if self.sampling_params.skip_reading_prefix_cache:
            return 0
        if self.sampling_params.prompt_logprobs is not None and self.next_prompt_logprob < self.num_prompt_tokens:
            return self.next_prompt_logprob - 1
        return self.num_tokens - 1

    def to_new_request(self) -> NewRequest:
        """How a worker gets to know the request when it takes its slot, the first time or again."""
        return NewRequest(
            slot=self.slot,
            frontend_incarnation=self.key[0],
            request_id=self.key[1],
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling_params=self.sampling_params,
            child_index=self.child_index,
            eos_token_ids=tuple(sorted(self.eos_token_ids)),
            adapter=self.adapter,
            prompt_logprobs_start=self.next_prompt_logprob,
            trace_context=self.trace_context,
        )
