"""Steps whose sampled ids stay on the device until the next step has been launched.

A step is launched without waiting for the one before it: where a row's last token is that one's sample, which the host
does not know yet, its id is taken on the device. The batch counts on a placeholder meanwhile. The host waits once per
step, for the sampled ids, and by then the next step is queued behind it, so the device never waits for Python.

Only steps whose rows want nothing but a token are launched so: processors, log-probabilities, drafts and grammars need
tokens or decisions on the host.
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
from worker_svc.inputs import InputBuffers
from worker_svc.models.interface import ForwardBatch, Model
from worker_svc.sampler import NOT_NUMBERS, Positions, sampled_positions
from worker_svc.sampling_state import MIN_TOKENS, RANDOM

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


def wants_only_tokens(plan: StepPlan, rows: Rows, batch: Batch) -> bool:
    """Whether the rows want greedy or random tokens and nothing else."""
    if rows.num_draft_tokens is not None or plan.awaits_grammar_mask:
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
    """int64 [sampled rows], on the host once the clock's last mark has passed."""
    largest: torch.Tensor
    """float32 [sampled rows], likewise."""
    clock: Clock
    is_settled: bool = field(default=False)


class DeviceSteps:
    """Launches steps and takes their samples over into the batch, in order. Belongs to the compute thread."""

    def __init__(
        self, model: Model, batch: Batch, inputs: InputBuffers, forward: Callable[[ForwardBatch], torch.Tensor]
    ) -> None:
        self._model, self._batch, self._inputs, self._forward = model, batch, inputs, forward
        device, num_slots = model.device, batch.max_num_seqs
        self._last_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        # Two of each: a step's are read after the next one has been launched.
        self._host_ids = [torch.empty(num_slots, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._host_largest = [torch.empty(num_slots, dtype=torch.float32, pin_memory=is_cuda) for _ in range(2)]
        self._turn = 0
        self._before: Launched | None = None

    def settle(self) -> None:
        """Waits for the step that is on its way, if there is one, and gives the batch its tokens."""
        if self._before is not None:
            before, self._before = self._before, None
            self._settle(before)

    def launch(
        self, rows: Rows, result: StepResult, on_launched: Callable[[], None], start_ns: int
    ) -> Deferred[StepResult]:
        """Launches a step that wants only tokens and was begun at start_ns.

        on_launched is called when the device has its work and the result of the step before is there.
        """
        before, batch, clock = self._before, self._batch, Clock(self._model.device)
        positions = sampled_positions(batch, rows)
        inputs, extra = self._inputs.stage(rows, self._columns(rows, positions, before))
        if before is not None:
            pending_tokens, pending_slots, *extra = extra
            inputs.input_ids.index_copy_(0, pending_tokens, self._last_ids.index_select(0, pending_slots))
        clock.mark()
        hidden = self._forward(inputs)
        clock.mark()
        ids, largest = self._sample(hidden, len(positions), extra)
        clock.mark()
        launched = Launched(result, rows, positions, batch.generations[rows.slots], ids, largest, clock)
        batch.commit(rows, rows.num_sampled_tokens, np.zeros(len(positions), np.int32))
        self._before = launched
        result.timings.prepare_ns = time.monotonic_ns() - start_ns
        if before is not None:
            self._settle(before)
        on_launched()

        def finish() -> StepResult:
            if not launched.is_settled:
                if self._before is launched:
                    self._before = None
                self._settle(launched)
            return launched.result

        return Deferred(finish, clock.is_passed)

    def _columns(self, rows: Rows, positions: Positions, before: Launched | None) -> list[npt.NDArray[np.generic]]:
        """What the device needs besides the model's inputs."""
        batch, found = self._batch, list[npt.NDArray[np.generic]]()
        ends = np.cumsum(rows.num_scheduled_tokens, dtype=np.int64)
        if before is not None:
            # The token that the host does not know yet is the last one known of its slot, so the last one of its row.
            is_pending = np.zeros(batch.max_num_seqs, np.bool_)
            sampled = before.positions.rows
            is_same = batch.generations[before.positions.slots] == before.generations[sampled]
            is_pending[before.positions.slots[is_same]] = True
            reach = rows.num_computed_tokens + rows.num_scheduled_tokens == batch.num_tokens[rows.slots]
            row = np.flatnonzero(is_pending[rows.slots] & reach)
            found += [ends[row] - 1, rows.slots[row].astype(np.int64)]
        if len(positions):
            random = np.flatnonzero(batch.sampling.wants[positions.slots] & RANDOM)
            found += [ends[positions.rows] - 1, positions.slots.astype(np.int64), random]
            found += batch.sampling.columns(positions.slots[random], positions.lengths[random])
        return found

    def _sample(
        self, hidden: torch.Tensor, num_positions: int, extra: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples and sends ids and largest logits on their way to the host."""
        self._turn = (self._turn + 1) % 2
        host_ids, host_largest = (x[self._turn][:num_positions] for x in (self._host_ids, self._host_largest))
        if num_positions:
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
        return host_ids, host_largest

    def _settle(self, launched: Launched) -> None:
        """Waits for a step and takes its samples over: tokens into the batch, failures to their slots."""
        batch, rows, positions = self._batch, launched.rows, launched.positions
        launched.clock.wait()
        launched.is_settled = True
        ids = launched.ids.numpy().astype(np.int32)
        is_same = batch.is_used[rows.slots] & (batch.generations[rows.slots] == launched.generations)
        kept = is_same[positions.rows]
        batch.token_ids[positions.slots[kept], positions.lengths[kept]] = ids[kept]
        is_good = np.isfinite(launched.largest.numpy())
        for i in np.flatnonzero(~is_good).tolist():
            slot = int(positions.slots[i])
            launched.result.errors[slot] = NOT_NUMBERS
            if kept[i] and not batch.is_failed[slot]:
                batch.fail(slot, NOT_NUMBERS)
        # A row that failed in the step before was launched all the same, and has its error.
        failed_rows = np.flatnonzero(is_same & batch.is_failed[rows.slots])
        for slot in rows.slots[failed_rows].tolist():
            launched.result.errors.setdefault(slot, batch.request(slot).error)
        is_good &= ~np.isin(positions.rows, failed_rows)
        result = launched.result
        result.slots, result.token_ids = positions.slots[is_good], ids[is_good] if len(ids) else EMPTY_INT32
        result.num_tokens = np.ones(len(result.slots), np.int32)
        launched.clock.set_durations(result.timings)
