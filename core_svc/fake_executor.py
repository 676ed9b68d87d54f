"""Stands in for a worker in tests and in the scheduler's benchmark; it runs no model.

It holds the core to the contract of worker.proto. Its KV pool stores, for every block and offset, the hash of the
sequence whose KV was written there; before it samples a row it checks that every position of the row is there with
the right content. A block given to two requests, a stale prefix, a position never computed: all of it shows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from core_svc.executor import CacheInfo, CacheSpec, ModelSpec
from core_svc.fake_model import FakeModel, Hashes, mix, prefix_hashes
from pagewire.columns import EMPTY_INT32
from pagewire.engine import LogprobColumns, ModelInfo
from pagewire.errors import AbortedError, FailedPreconditionError
from pagewire.plan import NewRequest, StepPlan, StepResult


class PlanViolation(AssertionError):
    """A plan broke the contract."""


@dataclass(slots=True)
class FakeOptions:
    """What the fake does beyond sampling."""

    is_checking: bool = True
    """False: no KV and no tokens are kept, and every row samples token 7 (for benchmarks)."""
    num_drafts: int = 0
    """Draft tokens proposed per row."""
    draft_acceptance: float = 0.5
    """Chance of each draft to be what the model would say."""
    latency_s: float = 0.0
    """Duration of a step, on another thread; 0 computes on the caller's."""
    seed: int = 0
    failures: dict[int, Exception] = field(default_factory=dict)
    """By count of plans, from 1: the step fails, and for the worker it has not happened."""
    failing_request_ids: set[int] = field(default_factory=set)
    """Rows of these requests fail when they sample."""
    while_executing: Callable[[StepPlan], None] | None = None
    """Called in every step before the result is there."""


@dataclass(slots=True)
class _Row:
    """What the worker keeps for a slot."""

    request: NewRequest
    tokens: list[int]
    hashes: Hashes
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    error: str = ""
    """The request has failed; its rows are skipped until the slot is released."""


class FakeExecutor:
    """An Executor without a model. `violations` lists what a core did wrong; tests assert that it is empty."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        model: FakeModel | None = None,
        max_model_len: int = 4096,
        options: FakeOptions | None = None,
        epoch: int = 1,
    ) -> None:
        self.model = model or FakeModel()
        self.options = options or FakeOptions()
        self.max_model_len = max_model_len
        self.violations: list[str] = []
        self.calls: list[str] = []
        """Calls other than submit, in order."""
        self.num_plans = 0
        self._random = random.Random(self.options.seed)
        self._pool = ThreadPoolExecutor(1) if self.options.latency_s else None
        spec = CacheSpec(block_size, num_blocks, 0, "", max_num_seqs, max_num_batched_tokens)
        self._start_epoch(spec, epoch)

    def _start_epoch(self, spec: CacheSpec, epoch: int) -> None:
        self._spec, self._epoch, self._next_step = spec, epoch, 1
        self._has_failed = False
        self._kv = np.zeros(spec.num_blocks * spec.block_size, np.uint64)
        self._rows: dict[int, _Row] = {}

    @property
    def cache(self) -> CacheInfo:
        return CacheInfo(self._spec.num_blocks)

    @property
    def used_slots(self) -> set[int]:
        """Slots that hold a request."""
        return set(self._rows)

    # --- Executor ---

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        """The fake model's description."""
        return ModelInfo(
            model=spec.model or "fake",
            architecture="FakeForCausalLM",
            dtype="float32",
            kv_cache_dtype="float32",
            tokenizer_sha256="",
            weights_id="fake",
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=(self.model.eos_token_id,),
        )

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """None."""
        return {}

    def initialize_cache(self, spec: CacheSpec, epoch: int) -> CacheInfo:
        """Makes an empty pool; the batch is empty too."""
        self.calls.append(f"initialize_cache({epoch})")
        if epoch <= self._epoch:
            raise FailedPreconditionError(f"epoch {epoch} is not above {self._epoch}")
        self._start_epoch(spec, epoch)
        return self.cache

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Runs the plan, at once or after latency_s on another thread."""
        if self._pool is not None:
            return self._pool.submit(self._execute, plan)
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def sleep(self, level: int) -> int:
        """Pretends to free as many bytes as the pool has entries."""
        self.calls.append(f"sleep({level})")
        self._rows.clear()
        return self._kv.nbytes

    def wake_up(self) -> None:
        """Does nothing."""
        self.calls.append("wake_up")

    def profile(self, start: bool) -> str:
        """Names a path that does not exist."""
        self.calls.append(f"profile({start})")
        return "fake-profile"

    def shutdown(self) -> None:
        """Ends the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    # --- one step ---

    def _execute(self, plan: StepPlan) -> StepResult:
        options = self.options
        self.num_plans += 1
        if options.latency_s:
            time.sleep(options.latency_s)
        if options.while_executing is not None:
            options.while_executing(plan)
        if not options.is_checking:
            return _constant_result(plan)
        try:
            self._check_order(plan)
            self._has_failed = self.num_plans in options.failures
            if self._has_failed:
                raise options.failures[self.num_plans]
            self._update_batch(plan)
            self._write_kv(plan)
            self._check_kv(plan)
            self._next_step += 1
            return self._sample(plan)
        except PlanViolation as violation:
            self.violations.append(str(violation))
            raise

    def _check_order(self, plan: StepPlan) -> None:
        if self._has_failed and (plan.epoch, plan.step) == (self._epoch, self._next_step + 1):
            raise AbortedError("the step before it failed")
        if (plan.epoch, plan.step) != (self._epoch, self._next_step):
            expected = f"expected epoch {self._epoch} step {self._next_step}"
            raise PlanViolation(f"{expected}, got epoch {plan.epoch} step {plan.step}")

    def _update_batch(self, plan: StepPlan) -> None:
        for slot in plan.released_slots.tolist():
            require(self._rows.pop(slot, None) is not None, f"slot {slot} was free already")
        for new in plan.new_requests:
            require(0 <= new.slot < self._spec.max_num_seqs, f"no slot {new.slot}")
            require(new.slot not in self._rows, f"slot {new.slot} is taken")
            self._rows[new.slot] = _Row(new, new.token_ids.tolist(), prefix_hashes(new.token_ids), num_computed=-1)
        slots = plan.slots.tolist()
        require(len(set(slots)) == len(slots), "a slot has two rows")
        require(set(slots) <= set(self._rows), "a row's slot is free")
        require({new.slot for new in plan.new_requests} <= set(slots), "a new request has no row")
        require(
            plan.total_num_scheduled_tokens <= self._spec.max_num_batched_tokens,
            f"{plan.total_num_scheduled_tokens} tokens exceed the budget",
        )
        blocks, drafts = iter(plan.new_block_ids.tolist()), iter(plan.draft_token_ids.tolist())
        num_drafts = plan.num_draft_tokens.tolist() or [0] * len(slots)
        for idx, slot in enumerate(slots):
            row = self._rows[slot]
            row.block_table.extend(next(blocks) for _ in range(int(plan.num_new_blocks[idx])))
            self._append_drafts(row, [next(drafts) for _ in range(num_drafts[idx])])
            if row.error:
                continue
            self._check_row(
                row,
                computed=int(plan.num_computed_tokens[idx]),
                scheduled=int(plan.num_scheduled_tokens[idx]),
                sampled=int(plan.num_sampled_tokens[idx]),
                num_drafts=num_drafts[idx],
            )
        require(next(blocks, None) is None and next(drafts, None) is None, "blocks or drafts are left over")

    def _append_drafts(self, row: _Row, drafts: list[int]) -> None:
        if drafts:
            row.hashes = np.append(row.hashes, prefix_hashes(drafts, len(row.tokens), int(row.hashes[-1])))
            row.tokens.extend(drafts)

    def _check_row(self, row: _Row, *, computed: int, scheduled: int, sampled: int, num_drafts: int) -> None:
        """A row's numbers; the drafts are at the end of its tokens already."""
        name = f"request {row.request.request_id}"
        require(scheduled > 0, f"{name}: an empty row")
        require(row.num_computed in (-1, computed), f"{name}: computed is {computed}, was {row.num_computed}")
        end = computed + scheduled
        if sampled:
            require(end == len(row.tokens), f"{name}: samples at {end} of {len(row.tokens)} tokens")
            require(sampled == num_drafts + 1, f"{name}: {sampled} samples for {num_drafts} drafts")
        else:
            require(end < len(row.tokens) and not num_drafts, f"{name}: the end is reached, and nothing is sampled")
        table = row.block_table
        require(all(0 < block < self._spec.num_blocks for block in table), f"{name}: block out of range")
        require(len(set(table)) == len(table), f"{name}: a block is twice in its table")
        require(len(table) * self._spec.block_size >= end, f"{name}: too few blocks")

    def _kv_slots(self, row: _Row, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        positions = np.arange(end)
        size = self._spec.block_size
        return np.asarray(row.block_table)[positions // size] * size + positions % size

    def _write_kv(self, plan: StepPlan) -> None:
        for idx, slot in enumerate(plan.slots.tolist()):
            row, start = self._rows[slot], int(plan.num_computed_tokens[idx])
            if row.error:
                continue
            end = start + int(plan.num_scheduled_tokens[idx])
            self._kv[self._kv_slots(row, end)[start:]] = row.hashes[start:end]
            row.num_computed = end

    def _check_kv(self, plan: StepPlan) -> None:
        """After all rows wrote: each finds its own prefix, and nobody else's."""
        for slot in plan.slots.tolist():
            row = self._rows[slot]
            end = 0 if row.error else row.num_computed
            is_there = self._kv[self._kv_slots(row, end)] == row.hashes[:end]
            require(
                bool(is_there.all()), f"request {row.request.request_id}: wrong KV at {np.flatnonzero(~is_there)[:5]}"
            )

    def _sample(self, plan: StepPlan) -> StepResult:
        """Samples in an order of its own: a worker's rows need not be in the plan's order."""
        result = StepResult(plan.epoch, plan.step, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32)
        slots, counts, tokens = [], [], []
        draft_counts, drafts = [], []
        order = list(range(plan.num_rows))
        self._random.shuffle(order)
        for idx in order:
            slot, num_sampled = int(plan.slots[idx]), int(plan.num_sampled_tokens[idx])
            row = self._rows[slot]
            if row.error:
                result.errors[slot] = row.error
                continue
            self._add_prompt_logprobs(result, slot, row, int(plan.num_computed_tokens[idx]))
            if not num_sampled:
                continue
            if row.request.request_id in self.options.failing_request_ids:
                result.errors[slot] = row.error = "the logits are not numbers"
                continue
            sampled = self._verify(row, num_sampled)
            slots.append(slot)
            counts.append(len(sampled))
            tokens.extend(sampled)
            proposed = self._propose(row)
            draft_counts.append(len(proposed))
            drafts.extend(proposed)
            if row.request.sampling_params.logprobs is not None:
                result.logprobs[slot] = self._logprobs(row, len(row.tokens) - len(sampled), len(row.tokens))
        result.slots, result.num_tokens = np.array(slots, np.int32), np.array(counts, np.int32)
        result.token_ids = np.array(tokens, np.int32)
        if drafts:
            result.num_draft_tokens, result.draft_token_ids = (
                np.array(draft_counts, np.int32),
                np.array(drafts, np.int32),
            )
        return result

    def _verify(self, row: _Row, num_sampled: int) -> list[int]:
        """Samples at each position, keeps what follows accepted drafts, and forgets the drafts after a wrong one."""
        drafts = row.tokens[len(row.tokens) - num_sampled + 1 :]
        known = len(row.tokens) - len(drafts)
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(self.model.next_token(row.hashes[known + len(sampled) - 1], row.request.sampling_params))
            if sampled[-1] != draft:
                break
        row.num_computed -= num_sampled - len(sampled)
        del row.tokens[known:]
        row.hashes = row.hashes[:known]
        self._append_drafts(row, sampled)
        return sampled

    def _propose(self, row: _Row) -> list[int]:
        if not self.options.num_drafts:
            return []
        proposed = self.model.generate(row.tokens, row.request.sampling_params, self.options.num_drafts)
        is_right = [self._random.random() < self.options.draft_acceptance for _ in proposed]
        return [
            token if right else (token + 1) % self.model.vocab_size
            for token, right in zip(proposed, is_right, strict=True)
        ]

    def _add_prompt_logprobs(self, result: StepResult, slot: int, row: _Row, computed: int) -> None:
        """Gives all positions that the chunk allows, those delivered before as well: the core has to drop them."""
        end = min(row.num_computed + 1, row.request.num_prompt_tokens)
        if row.request.sampling_params.prompt_logprobs is not None and computed + 1 < end:
            result.prompt_logprobs[slot] = (computed + 1, self._logprobs(row, computed + 1, end))

    def _logprobs(self, row: _Row, start: int, end: int) -> LogprobColumns:
        return fake_logprobs(row.tokens, row.hashes, start, end)


def fake_logprobs(tokens: list[int], hashes: Hashes, start: int, end: int) -> LogprobColumns:
    """Log-probabilities of positions [start, end), a function of what is before each."""
    values = [-(mix(int(hashes[position])) % 1000) / 100 for position in range(start, end)]
    return LogprobColumns(
        np.array(tokens[start:end], np.int32).reshape(-1, 1),
        np.array(values, np.float32).reshape(-1, 1),
        np.ones(end - start, np.int32),
    )


def require(condition: bool, message: str) -> None:
    """Raises PlanViolation unless the condition holds."""
    if not condition:
        raise PlanViolation(message)


def _constant_result(plan: StepPlan) -> StepResult:
    slots = plan.slots[plan.num_sampled_tokens > 0]
    return StepResult(plan.epoch, plan.step, slots, np.ones_like(slots), np.full_like(slots, 7))
