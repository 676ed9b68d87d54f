"""Steps whose sampled ids stay on the device until the next step has been launched.

A step is launched without waiting for the one before it: where a row's last token is that one's sample, which the host
does not know yet, its id is taken on the device. The batch counts on a placeholder meanwhile. The host waits once per
step, for the sampled ids, and by then the next step is queued behind it, so the device never waits for Python.

Only steps whose rows want nothing but tokens are launched so: processors and grammars need the tokens before theirs on
the host, and log-probabilities travel by the megabyte. Drafts are verified on the device; how many tokens a row gets by
them is known only when the step has ended, so the next plan is checked after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

import kernels
from kernels.sampling import Draws
from pagewire.columns import EMPTY_INT32
from pagewire.plan import StepPlan, StepResult, Timings
from worker_svc.batch import Batch, Rows
from worker_svc.compute import Deferred
from worker_svc.device_failure import DeviceLostError
from worker_svc.inputs import InputBuffers
from worker_svc.models.interface import ForwardBatch, Model
from worker_svc.ragged import rows_and_places, runs_of_rows
from worker_svc.sampler import NOT_NUMBERS, Positions, most_logits_rows, sampled_positions
from worker_svc.sampling_state import MIN_TOKENS, RANDOM

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


def wants_only_tokens(plan: StepPlan, rows: Rows, batch: Batch) -> bool:
    """Whether the rows want greedy or random tokens and nothing else; drafts before them are fine."""
    if plan.awaits_grammar_mask:
        return False
    state, slots = batch.sampling, rows.slots
    wanted = state.wanted(slots)
    if wanted & MIN_TOKENS and np.count_nonzero(batch.num_tokens[slots] < state.first_free_stop[slots]):
        return False
    return not wanted & ~(RANDOM | MIN_TOKENS)


class Clock:
    """Marks on the device's stream; durations between them can be read once the device has passed the last one."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Sets a mark behind what has been launched."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def wait(self) -> None:
        """Waits for the last mark."""
        if self._marks:
            self._marks[-1].synchronize()

    def is_passed(self) -> bool:
        """Whether the last mark has been passed; a device that has failed counts, `wait` will raise."""
        try:
            return not self._marks or self._marks[-1].query()
        except RuntimeError:
            return True

    def set_durations(self, timings: Timings) -> None:
        """Of a forward pass and of sampling, from three marks; without a GPU nothing changes."""
        if self._marks:
            self.wait()
            before, between, after = self._marks
            timings.forward_ns = int(before.elapsed_time(between) * 1e6)
            timings.sample_ns = int(between.elapsed_time(after) * 1e6)


@dataclass(slots=True)
class Launched:
    """A step on its way: what it samples, and where that goes."""

    result: StepResult
    rows: Rows
    positions: Positions
    generations: Indices
    """Of the rows' slots: whether a slot still has the request of the launch."""
    ids: torch.Tensor
    """int64 [sampled positions], on the host once the clock's last mark has passed; -1 behind a rejected draft."""
    largest: torch.Tensor
    """float32 [sampled positions], likewise."""
    num_emitted: torch.Tensor | None
    """int64 [rows], likewise; None in a step without drafts, whose sampled rows emit one each."""
    clock: Clock
    token_ids: Ints = field(default_factory=lambda: EMPTY_INT32)
    """The ids once the step is settled: `ids` belongs to a later step by and by."""
    is_good: npt.NDArray[np.bool_] | None = None
    """Whether each position's logits are numbers, once the step is settled."""

    @property
    def is_settled(self) -> bool:
        return self.is_good is not None


class DeviceSteps:
    """Launches steps and takes their samples over into the batch, in order. Belongs to the compute thread."""

    def __init__(
        self, model: Model, batch: Batch, inputs: InputBuffers, forward: Callable[[ForwardBatch], torch.Tensor]
    ) -> None:
        self._model, self._batch, self._inputs, self._forward = model, batch, inputs, forward
        device, num_slots, num_tokens = model.device, batch.max_num_seqs, batch.max_num_batched_tokens
        self._last_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        # Two of each: a step's are read after the next one has been launched.
        self._host_ids = [torch.empty(num_tokens, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._host_largest = [torch.empty(num_tokens, dtype=torch.float32, pin_memory=is_cuda) for _ in range(2)]
        self._host_emitted = [torch.empty(num_slots, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._turn = 0
        self._before: Launched | None = None
        self._settled: Launched | None = None

    def settle(self) -> None:
        """Waits for the step that is on its way, if there is one, and gives the batch its tokens."""
        if self._before is not None:
            self._settle(self._before)

    def settle_drafts(self) -> None:
        """Does so where that step has drafts: without their number the batch can't be held against the next plan."""
        if self._before is not None and self._before.num_emitted is not None:
            self._settle(self._before)

    def rewind(self) -> None:
        """Called after a step that failed was undone: gives the batch once more what it has of the step before.

        That step may have been settled when slots had changed hands, which is undone; and what the next step takes on
        the device of it may be overwritten.
        """
        if self._before is not None:
            self._settle(self._before)
        elif self._settled is not None:
            self._take_over(self._settled)

    def launch(
        self, rows: Rows, result: StepResult, on_launched: Callable[[], None], start_ns: int
    ) -> Deferred[StepResult]:
        """Launches a step that wants only tokens and was begun at start_ns.

        on_launched is called when the device has its work and the result of the step before is there. Where anything
        raises, the step before is the last one still; undoing the step and `rewind` follow.
        """
        before, batch, clock = self._before, self._batch, Clock(self._model.device)
        positions = sampled_positions(batch, rows)
        columns = self._pending(rows, before) + self._sampling(rows, positions)
        inputs, extra = self._inputs.stage(rows, columns)
        if before is not None:
            pending_tokens, pending_slots, *extra = extra
            inputs.input_ids.index_copy_(0, pending_tokens, self._last_ids.index_select(0, pending_slots))
        clock.mark()
        hidden = self._forward(inputs)
        clock.mark()
        turn = (self._turn + 1) % 2
        sampled = self._sample(hidden, rows, len(positions), extra, turn)
        clock.mark()
        launched = Launched(result, rows, positions, batch.generations[rows.slots], *sampled, clock)
        result.timings.prepare_ns = time.monotonic_ns() - start_ns
        if before is not None:
            self._settle(before)
        on_launched()
        # From here on nothing raises.
        if launched.num_emitted is None:
            batch.commit(rows, rows.num_sampled_tokens, np.zeros(len(positions), np.int32))
        self._before, self._turn = launched, turn

        def finish() -> StepResult:
            if not launched.is_settled:
                self._settle(launched)
            return launched.result

        return Deferred(finish, clock.is_passed)

    def _pending(self, rows: Rows, before: Launched | None) -> list[npt.NDArray[np.generic]]:
        """Places of tokens that the host does not know yet, and the slots whose last sampled id they are."""
        if before is None:
            return []
        batch = self._batch
        # Such a token is the last one known of its slot, so the last one of its row.
        is_pending = np.zeros(batch.max_num_seqs, np.bool_)
        is_same = batch.generations[before.positions.slots] == before.generations[before.positions.rows]
        is_pending[before.positions.slots[is_same]] = True
        num_drafts = 0 if rows.num_draft_tokens is None else rows.num_draft_tokens
        reach = rows.num_computed_tokens + rows.num_scheduled_tokens - num_drafts == batch.num_tokens[rows.slots]
        row = np.flatnonzero(is_pending[rows.slots] & reach)
        last = np.cumsum(rows.num_scheduled_tokens, dtype=np.int64) - num_drafts - 1
        return [last[row], rows.slots[row].astype(np.int64)]

    def _sampling(self, rows: Rows, positions: Positions) -> list[npt.NDArray[np.generic]]:
        """What `_sample` needs on the device; the last seven columns are those of Draws."""
        if not len(positions):
            return []
        state, slots = self._batch.sampling, positions.slots
        ends = np.cumsum(rows.num_scheduled_tokens, dtype=np.int64)[positions.rows]
        is_random = (state.wants[slots] & RANDOM) != 0
        if rows.num_draft_tokens is None:
            random = np.flatnonzero(is_random)
            draws = state.columns(slots[random], positions.lengths[random])
            return [ends - 1, slots.astype(np.int64), random, *draws]
        row, place = rows_and_places(rows.num_draft_tokens)
        draft_slots = rows.slots[row]
        drafts = self._batch.token_ids[draft_slots, self._batch.num_tokens[draft_slots] + place].astype(np.int64)
        counts = (rows.num_sampled_tokens, rows.num_draft_tokens)
        starts = [np.concatenate([[0], np.cumsum(count)]).astype(np.int32) for count in counts]
        temperature, *draws = state.columns(slots, positions.lengths)
        index = ends - rows.num_sampled_tokens[positions.rows] + positions.places
        return [index, drafts, *starts, np.where(is_random, temperature, np.float32(0)), *draws]

    def _sample(
        self, hidden: torch.Tensor, rows: Rows, num_positions: int, extra: list[torch.Tensor], turn: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Samples and sends ids, largest logits and what rows emit on their way to the host."""
        host_ids, host_largest = (x[turn][:num_positions] for x in (self._host_ids, self._host_largest))
        if not num_positions:
            return host_ids, host_largest, None
        if rows.num_draft_tokens is not None:
            host_emitted = self._host_emitted[turn][: len(rows)]
            self._verify(hidden, rows, rows.num_draft_tokens, extra, (host_ids, host_largest, host_emitted))
            return host_ids, host_largest, host_emitted
        index, slots, random, *columns = extra
        logits = self._model.compute_logits(hidden if num_positions == len(hidden) else hidden[index])
        ids, largest = kernels.argmax(logits)
        if len(random):
            is_all = len(random) == num_positions
            drawn = kernels.sample(logits if is_all else logits[random], Draws(*columns))
            ids = drawn if is_all else ids.index_copy(0, random, drawn)
        # Logits that are not numbers fail their row, but only later: until then any id must be one that exists.
        ids = ids.clamp(0, self._model.vocab_size - 1)
        self._last_ids.index_copy_(0, slots, ids)
        host_ids.copy_(ids, non_blocking=True)
        host_largest.copy_(largest, non_blocking=True)
        return host_ids, host_largest, None

    def _verify(
        self,
        hidden: torch.Tensor,
        rows: Rows,
        num_drafts: Ints,
        extra: list[torch.Tensor],
        host: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Samples at every position and accepts drafts, some rows at a time: logits of all drafts may be too many."""
        index, drafts, starts, draft_starts, *columns = extra
        ends, draft_ends = np.cumsum(rows.num_sampled_tokens), np.cumsum(num_drafts)
        for first, end in runs_of_rows(rows.num_sampled_tokens, most_logits_rows(self._batch.max_num_seqs)):
            start, draft_start = (int(x[first - 1]) if first else 0 for x in (ends, draft_ends))
            here, their_drafts = slice(start, int(ends[end - 1])), slice(draft_start, int(draft_ends[end - 1]))
            host_ids, host_largest = host[0][here], host[1][here]
            host_emitted = host[2][first:end]
            if not len(host_ids):
                host_emitted.fill_(0)
                continue
            logits = self._model.compute_logits(hidden[index[here]])
            largest = kernels.argmax(logits)[1]
            ids, emitted = kernels.verify_drafts(
                logits,
                starts[first : end + 1] - start,
                drafts[their_drafts],
                draft_starts[first : end + 1] - draft_start,
                Draws(*(column[here] for column in columns)),
            )
            for on_host, found in ((host_ids, ids), (host_largest, largest), (host_emitted, emitted)):
                on_host.copy_(found, non_blocking=True)

    def _settle(self, launched: Launched) -> None:
        """Waits for a step, takes its samples over and fills its result. Raises DeviceLostError."""
        try:
            launched.clock.wait()
        except RuntimeError as error:
            raise DeviceLostError(error) from error
        if self._before is launched:
            self._before = None
        launched.token_ids = launched.ids.numpy().astype(np.int32)
        launched.is_good = np.isfinite(launched.largest.numpy())
        if launched.num_emitted is None:
            self._settled = launched
            self._take_over(launched)
            self._fill_result(launched, launched.is_good)
        else:
            self._settled = None  # nothing changes between the launch and now: it need not be taken over again
            self._settle_drafts(launched, launched.num_emitted.numpy().astype(np.int32))
        launched.clock.set_durations(launched.result.timings)

    def _take_over(self, launched: Launched) -> None:
        """Gives tokens and failures to the slots that still have the request of the launch."""
        assert launched.is_good is not None
        batch, positions = self._batch, launched.positions
        kept = self._is_same(launched)[positions.rows]
        batch.token_ids[positions.slots[kept], positions.lengths[kept]] = launched.token_ids[kept]
        for i in np.flatnonzero(kept & ~launched.is_good).tolist():
            slot = int(positions.slots[i])
            if not batch.is_failed[slot]:
                batch.fail(slot, NOT_NUMBERS)

    def _is_same(self, launched: Launched) -> npt.NDArray[np.bool_]:
        """Whether each row's slot has its request still."""
        slots = launched.rows.slots
        return self._batch.is_used[slots] & (self._batch.generations[slots] == launched.generations)

    def _fill_result(self, launched: Launched, is_good: npt.NDArray[np.bool_]) -> None:
        positions, result = launched.positions, launched.result
        failed_rows = self._note_errors(launched, is_good)
        is_good = is_good & ~np.isin(positions.rows, failed_rows)
        result.slots, result.token_ids = positions.slots[is_good], launched.token_ids[is_good]
        result.num_tokens = np.ones(len(result.slots), np.int32)

    def _note_errors(self, launched: Launched, is_good: npt.NDArray[np.bool_]) -> Indices:
        """Notes in the result which rows failed; returns those that their slot's request failed with."""
        batch, slots, errors = self._batch, launched.rows.slots, launched.result.errors
        for slot in launched.positions.slots[~is_good].tolist():
            errors[slot] = NOT_NUMBERS
        # A row that failed in the step before was launched all the same, and has its error.
        failed_rows = np.flatnonzero(self._is_same(launched) & batch.is_failed[slots])
        for slot in slots[failed_rows].tolist():
            errors.setdefault(slot, batch.request(slot).error)
        return failed_rows

    def _settle_drafts(self, launched: Launched, num_emitted: Ints) -> None:
        """Moves the batch on by what a step with drafts emits; no plan has changed it since the launch."""
        assert launched.is_good is not None
        batch, rows, positions, result = self._batch, launched.rows, launched.positions, launched.result
        for slot in np.unique(positions.slots[~launched.is_good]).tolist():
            if not batch.is_failed[slot]:
                batch.fail(slot, NOT_NUMBERS)
        num_emitted[self._note_errors(launched, launched.is_good)] = 0
        result.token_ids = launched.token_ids[positions.places < num_emitted[positions.rows]]
        batch.commit(rows, num_emitted, result.token_ids)
        emits = num_emitted > 0
        result.slots, result.num_tokens = rows.slots[emits], num_emitted[emits]
