"""Executes plans on one model, one KV pool and one batch: update -> forward -> sample -> commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

import kernels
from kernels.dispatch import is_interpreting
from pagewire.columns import EMPTY_INT32
from pagewire.engine import LogprobColumns
from pagewire.errors import InternalError, InvalidArgumentError, PagewireError, violation
from pagewire.plan import GrammarMask, StepPlan, StepResult, Timings
from pagewire.runtime.log_fields import fields
from worker_svc.batch import Batch, Rows
from worker_svc.block_moves import BlockMoves
from worker_svc.compute import Deferred
from worker_svc.cuda_graphs import DecodeGraphs, Recorder
from worker_svc.decode_programs import DecodePrograms
from worker_svc.device_failure import DeviceLostError, is_lost
from worker_svc.device_steps import Clock, DeviceSteps, wants_only_tokens
from worker_svc.device_warm_up import warm_up_device
from worker_svc.inputs import InputBuffers
from worker_svc.kv_pool import KvPool
from worker_svc.models.interface import ForwardBatch, Model
from worker_svc.models.native import Decoder
from worker_svc.ragged import runs_of_rows
from worker_svc.sampler import (
    LOGITS_SLICE,
    NOT_NUMBERS,
    Sampled,
    logprob_columns,
    most_logits_rows,
    sample_rows,
    sampled_positions,
)
from worker_svc.sampling_state import PROMPT_LOGPROBS

logger = logging.getLogger(__name__)
MAX_LOGPROB_BYTES = 48 << 20
"""Most bytes of log-probabilities in one result; the transport's message limit is 64 MiB."""
AwaitGrammarMask = Callable[[], GrammarMask]


class ModelRunner:
    """All methods belong to one thread. `num_progress` may be read from any."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        batch: Batch,
        *,
        cuda_graphs: bool = False,
        is_device: bool | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """is_device: whether steps are launched and waited for later; None: on a GPU, and where the CPU stands for one.

        recorder: what records decode steps instead of CUDA graphs.
        """
        self.model = model
        self.pool = pool
        self.batch = batch
        if is_device is None:
            is_device = model.device.type != "cpu" or is_interpreting()
        self._inputs = InputBuffers(batch, model.device, is_staged=is_device)
        self._block_moves = BlockMoves(pool.caches, model.device, is_staged=is_device)
        self._forward: Callable[[ForwardBatch], torch.Tensor] = DecodePrograms(model, pool.caches)
        # A model of transformers' may wait for the device somewhere, and a capture that fails can't be undone for sure.
        is_capturable = model.device.type == "cuda" and isinstance(model, Decoder)
        sizes = {name: getattr(batch, name) for name in ("max_num_seqs", "max_model_len", "block_size")}
        if model.device.type == "cuda":
            warm_up_device(model, pool.caches, **sizes, max_num_batched_tokens=batch.max_num_batched_tokens)
        if recorder is not None or (cuda_graphs and is_capturable):
            graphs = DecodeGraphs(model, pool.caches, **sizes, recorder=recorder)
            graphs.capture_all()
            self._forward = graphs
        self._device_steps = DeviceSteps(model, batch, self._inputs, self._forward) if is_device else None
        self._num_phases = 0

    @property
    def num_progress(self) -> int:
        """Changes whenever a step gets on: with each phase, and with each layer of the model."""
        return self._num_phases + self.pool.caches.num_reads

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        await_grammar_mask: AwaitGrammarMask | None = None,
        on_prepared: Callable[[], None] | None = None,
    ) -> StepResult:
        """See `start`."""
        started = self.start(plan, await_grammar_mask, on_prepared)
        return started.finish() if isinstance(started, Deferred) else started

    @torch.inference_mode()
    def start(
        self,
        plan: StepPlan,
        await_grammar_mask: AwaitGrammarMask | None = None,
        on_prepared: Callable[[], None] | None = None,
    ) -> StepResult | Deferred[StepResult]:
        """Runs one step; calls on_prepared when the forward pass is about to begin or, on a device, has been launched.

        Raises InvalidArgumentError for a plan that is wrong and InternalError for a computation that fails; the batch
        is as before then. DeviceLostError: no later step will run either. A row that fails by itself is in the result's
        errors.
        """
        start_ns = time.monotonic_ns()
        if self._device_steps is not None:
            self._device_steps.settle_drafts()
        rows, undo = self.batch.apply(plan)
        try:
            return self._run(plan, rows, await_grammar_mask, on_prepared or _nothing, start_ns)
        except PagewireError:
            self._undo(undo)
            raise
        except Exception as error:
            logger.exception("step %d failed", plan.step, extra=fields(epoch=plan.epoch, step=plan.step))
            if is_lost(self.model.device):
                undo()
                raise DeviceLostError(error) from error
            self._undo(undo)
            raise InternalError(f"{type(error).__name__}: {error}") from error

    def _undo(self, undo: Callable[[], None]) -> None:
        undo()
        if self._device_steps is not None:
            self._device_steps.rewind()

    def _run(
        self,
        plan: StepPlan,
        rows: Rows,
        await_grammar_mask: AwaitGrammarMask | None,
        on_prepared: Callable[[], None],
        start_ns: int,
    ) -> StepResult | Deferred[StepResult]:
        if len(plan.copy_sources) or len(plan.zero_block_ids):
            self._block_moves.run(plan.copy_sources, plan.copy_destinations, plan.zero_block_ids)
        result = StepResult(plan.epoch, plan.step, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32)
        device_steps = self._device_steps
        if device_steps is not None and not wants_only_tokens(plan, rows, self.batch):
            device_steps.settle()
            device_steps = None
            rows = rows.only(~self.batch.is_failed[rows.slots])  # the step before may just have failed a row
        result.errors = self._known_errors(plan)
        if not len(rows):
            result.timings = Timings(prepare_ns=time.monotonic_ns() - start_ns)
            return result
        if device_steps is not None:
            launched = device_steps.launch(rows, result, on_prepared, start_ns)
            self._num_phases += 1
            return launched
        inputs = self._inputs.build(rows)
        self._num_phases += 1
        prepared_ns = time.monotonic_ns()
        on_prepared()
        clock = Clock(self.model.device)
        clock.mark()
        hidden = self._forward(inputs)
        clock.mark()
        self._num_phases += 1
        forward_ns = time.monotonic_ns()
        bytes_left = MAX_LOGPROB_BYTES
        errors: dict[int, str] = {}
        if self.batch.sampling.wanted(rows.slots) & PROMPT_LOGPROBS:
            result.prompt_logprobs, errors, bytes_left = self._prompt_logprobs(rows, inputs, hidden)
        mask = self._grammar_mask(plan, rows, await_grammar_mask)
        sampled = self._sample(rows, hidden, mask, bytes_left)
        clock.mark()
        self._commit(rows, sampled, errors, result)
        result.timings = Timings(
            prepare_ns=prepared_ns - start_ns,
            forward_ns=forward_ns - prepared_ns,
            sample_ns=time.monotonic_ns() - forward_ns,
        )
        clock.set_durations(result.timings)
        return result

    def _known_errors(self, plan: StepPlan) -> dict[int, str]:
        """Rows that are skipped because their request failed before, or was wrong from the start."""
        is_failed = self.batch.is_failed
        if not np.count_nonzero(is_failed):
            return {}
        new = [request.slot for request in plan.new_requests if is_failed[request.slot]]
        return {slot: self.batch.request(slot).error for slot in {*plan.slots[is_failed[plan.slots]].tolist(), *new}}

    def _sample(self, rows: Rows, hidden: torch.Tensor, mask: GrammarMask | None, max_bytes: int) -> Sampled:
        """What the rows emit; where drafts make positions many, some rows at a time."""
        starts = np.cumsum(rows.num_scheduled_tokens, dtype=np.int64) - rows.num_scheduled_tokens
        if rows.num_draft_tokens is None:
            return self._sample_run(rows, starts, hidden, mask, max_bytes)
        found, place = list[Sampled](), np.arange(len(rows))
        for first, end in runs_of_rows(rows.num_sampled_tokens, most_logits_rows(self.batch.max_num_seqs)):
            run = rows.only((place >= first) & (place < end))
            found.append(self._sample_run(run, starts[first:end], hidden, mask, max_bytes))
            max_bytes -= found[-1].logprob_bytes
        return Sampled.of_runs(found)

    def _sample_run(
        self, rows: Rows, starts: npt.NDArray[np.int64], hidden: torch.Tensor, mask: GrammarMask | None, max_bytes: int
    ) -> Sampled:
        """Samples rows whose tokens begin at `starts` in the hidden states."""
        positions = sampled_positions(self.batch, rows)
        if not len(positions):
            return Sampled(np.zeros(len(rows), np.int32), EMPTY_INT32, {}, {})
        if len(positions) < len(hidden):
            row = positions.rows
            firsts = starts + rows.num_scheduled_tokens - rows.num_sampled_tokens
            index = firsts[row] + positions.places
            hidden = hidden[torch.from_numpy(index).to(hidden.device)]
        logits = self.model.compute_logits(hidden)
        self._num_phases += 1
        return sample_rows(logits, self.batch, rows, positions, mask, max_bytes)

    def _commit(self, rows: Rows, sampled: Sampled, errors: dict[int, str], result: StepResult) -> None:
        num_emitted, result.token_ids, result.logprobs = sampled.num_emitted, sampled.token_ids, sampled.logprobs
        if failed := sampled.errors | errors:
            is_failed = np.isin(rows.slots, list(failed))
            result.token_ids = sampled.token_ids[np.repeat(~is_failed, num_emitted)]
            num_emitted = np.where(is_failed, np.int32(0), num_emitted)
            result.logprobs = {slot: columns for slot, columns in sampled.logprobs.items() if slot not in failed}
            result.prompt_logprobs = {s: found for s, found in result.prompt_logprobs.items() if s not in failed}
            result.errors |= failed
        self.batch.commit(rows, num_emitted, result.token_ids)
        for slot, error in failed.items():
            self.batch.fail(slot, error)
        result.slots, result.num_tokens = rows.slots, num_emitted
        if np.count_nonzero(num_emitted) < len(rows):
            result.slots, result.num_tokens = rows.slots[num_emitted > 0], num_emitted[num_emitted > 0]

    def _prompt_logprobs(
        self, rows: Rows, inputs: ForwardBatch, hidden: torch.Tensor
    ) -> tuple[dict[int, tuple[int, LogprobColumns]], dict[int, str], int]:
        """Prompt log-probabilities of this chunk by slot, rows that fail by them, and the bytes left for others.

        The hidden state at position p predicts token p + 1, so a chunk [c, c + n) yields the entries of the positions
        c + 1 to c + n, as far as they are prompt.
        """
        found: dict[int, tuple[int, LogprobColumns]] = {}
        errors: dict[int, str] = {}
        bytes_left = MAX_LOGPROB_BYTES
        starts = inputs.query_start_loc.cpu().numpy()
        for row in np.flatnonzero(self.batch.sampling.wants[rows.slots] & PROMPT_LOGPROBS).tolist():
            slot = int(rows.slots[row])
            request = self.batch.request(slot)
            wanted = request.params.prompt_logprobs
            computed = int(rows.num_computed_tokens[row])
            if wanted is None or computed >= request.num_prompt_tokens:
                continue
            first = max(request.prompt_logprobs_start, computed + 1)
            end = min(request.num_prompt_tokens, computed + int(rows.num_scheduled_tokens[row]) + 1)
            if first >= end:
                continue
            num_bytes = (end - first) * (1 + (self.model.vocab_size if wanted < 0 else wanted)) * 8
            if num_bytes > bytes_left:
                errors[slot] = "its prompt log-probabilities do not fit into one message: ask for fewer"
                continue
            bytes_left -= num_bytes
            offset = int(starts[row]) - computed - 1
            columns = self._prompt_columns(hidden[first + offset : end + offset], slot, first, wanted)
            if columns is None:
                errors[slot] = NOT_NUMBERS
            else:
                found[slot] = (first, columns)
        return found, errors, bytes_left

    def _prompt_columns(self, hidden: torch.Tensor, slot: int, first: int, num_likeliest: int) -> LogprobColumns | None:
        """Columns of the prompt tokens from `first` on; None where logits are not numbers."""
        parts = []
        for start in range(0, len(hidden), LOGITS_SLICE):
            logits = self.model.compute_logits(hidden[start : start + LOGITS_SLICE])
            self._num_phases += 1
            if not bool(kernels.argmax(logits)[1].isfinite().all()):
                return None
            chosen = self.batch.token_ids[slot, first + start : first + start + len(logits)]
            parts.append(logprob_columns(logits, chosen, num_likeliest))
        return LogprobColumns(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )

    def _grammar_mask(
        self, plan: StepPlan, rows: Rows, await_grammar_mask: AwaitGrammarMask | None
    ) -> GrammarMask | None:
        """The plan's mask, waited for only now that the forward pass has run; checked against the rows."""
        if not plan.awaits_grammar_mask:
            return None
        if await_grammar_mask is None:
            raise InvalidArgumentError([violation("plan.awaits_grammar_mask", True, "no mask can come on this path")])
        mask = await_grammar_mask()
        words = -(-self.model.vocab_size // 32)
        num_sampled = dict(zip(rows.slots.tolist(), rows.num_sampled_tokens.tolist(), strict=True))
        # A row that failed has no positions to mask; its mask is of no use and no harm.
        skipped = {slot for slot in plan.slots.tolist() if self.batch.is_failed[slot]}
        expected = [num_sampled.get(slot) for slot in mask.slots.tolist()]
        is_right = (mask.epoch, mask.step) == (plan.epoch, plan.step) and len(set(mask.slots.tolist())) == len(expected)
        is_right = is_right and len(mask.num_mask_rows) == len(expected)
        is_right = is_right and len(mask.mask) == int(mask.num_mask_rows.sum(dtype=np.int64)) * words
        for slot, count, rows_of_slot in zip(mask.slots.tolist(), expected, mask.num_mask_rows.tolist(), strict=False):
            is_right = is_right and rows_of_slot >= 0 and (count == rows_of_slot or slot in skipped)
        if not is_right:
            limit = f"must be for this step, with one row of {words} words per sampled position of its slots"
            raise InvalidArgumentError([violation("grammar_mask", f"step {mask.step}", limit)], reason="BAD_PLAN")
        return mask


def _nothing() -> None:
    """Nobody waits for the preparation's end."""
