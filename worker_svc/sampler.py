"""From logits to tokens: processors, greedy or noise, acceptance of drafts, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

import kernels
from pagewire.engine import LogprobColumns
from pagewire.plan import GrammarMask
from worker_svc.batch import Batch, Rows
from worker_svc.processors import RowContext, apply_processors
from worker_svc.ragged import rows_and_places
from worker_svc.sampling_state import LOGPROBS, MIN_TOKENS, PROCESSORS, RANDOM

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
NOT_NUMBERS = "the model's logits are not numbers"
NOTHING_ALLOWED = "the logits processors forbid every token"
LOGITS_SLICE = 64
"""Prompt positions whose logits exist at the same time: a whole chunk's would take gigabytes."""


def most_logits_rows(max_num_seqs: int) -> int:
    """Rows of logits that exist at the same time: with drafts a step may sample at more positions, in several runs.

    Only one row's own positions may be more.
    """
    return max(max_num_seqs, LOGITS_SLICE)


@dataclass(slots=True)
class Positions:
    """Where a step samples: one entry per sampled position, the positions of a row one after another."""

    rows: Indices
    """Row of each position."""
    slots: Ints
    lengths: Indices
    """Tokens before the sampled one, drafts too."""
    places: Indices
    """0 for a row's first sampled position, 1 for the next ..."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Sampled:
    """What was sampled. Columns over the step's rows."""

    num_emitted: Ints
    """0 for rows that do not sample or failed."""
    token_ids: Ints
    """Emitted tokens of all rows."""
    errors: dict[int, str]
    """By slot."""
    logprobs: dict[int, LogprobColumns]
    """By slot."""

    @staticmethod
    def of_runs(runs: list[Sampled]) -> Sampled:
        """Of all the rows, from runs of them."""
        if len(runs) == 1:
            return runs[0]
        return Sampled(
            np.concatenate([run.num_emitted for run in runs]),
            np.concatenate([run.token_ids for run in runs]),
            {slot: error for run in runs for slot, error in run.errors.items()},
            {slot: columns for run in runs for slot, columns in run.logprobs.items()},
        )

    @property
    def logprob_bytes(self) -> int:
        """Of the log-probabilities in a result, as `max_logprob_bytes` counts them."""
        return sum(columns.token_ids.size * 8 for columns in self.logprobs.values())


def sampled_positions(batch: Batch, rows: Rows) -> Positions:
    """The last num_sampled_tokens positions of every row."""
    if rows.num_draft_tokens is None:
        row = np.flatnonzero(rows.num_sampled_tokens)
        slots = rows.slots if len(row) == len(rows) else rows.slots[row]
        return Positions(row, slots, batch.num_tokens[slots].astype(np.int64), np.zeros(len(row), np.int64))
    row, places = rows_and_places(rows.num_sampled_tokens)
    slots = rows.slots[row]
    return Positions(row, slots, batch.num_tokens[slots] + places, places)


def sample_rows(
    logits: torch.Tensor,
    batch: Batch,
    rows: Rows,
    positions: Positions,
    mask: GrammarMask | None,
    max_logprob_bytes: int,
) -> Sampled:
    """Samples every position and decides what each row emits.

    logits: float32 [positions, vocab_size], the model's own; not changed.
    """
    token_ids, largest = kernels.argmax(logits)
    tokens = token_ids.cpu().numpy()
    errors: dict[int, str] = {}
    _note_failures(largest, positions.slots, NOT_NUMBERS, errors)
    wanted = batch.sampling.wanted(positions.slots)
    if mask is not None or wanted & (PROCESSORS | MIN_TOKENS | RANDOM):
        _sample_positions(logits, tokens, batch, positions, mask, errors)
    num_emitted = rows.num_sampled_tokens
    if rows.num_draft_tokens is not None:
        num_emitted = _accept_drafts(batch, rows, positions, tokens)
    logprobs: dict[int, LogprobColumns] = {}
    if errors:
        num_emitted = _without(num_emitted, rows.slots, errors)
    if wanted & LOGPROBS:
        logprobs = _logprobs(logits, batch, rows, num_emitted, tokens, errors, max_logprob_bytes)
        num_emitted = _without(num_emitted, rows.slots, errors)
    if errors or rows.num_draft_tokens is not None:
        tokens = tokens[positions.places < num_emitted[positions.rows]]
    return Sampled(num_emitted, tokens.astype(np.int32), errors, logprobs)


def _without(num_emitted: Ints, slots: Ints, errors: dict[int, str]) -> Ints:
    """0 for the rows that failed."""
    return np.where(np.isin(slots, list(errors)), np.int32(0), num_emitted)


def _sample_positions(
    logits: torch.Tensor,
    tokens: Indices,
    batch: Batch,
    positions: Positions,
    mask: GrammarMask | None,
    errors: dict[int, str],
) -> None:
    """Overwrites the greedy tokens of positions that have a processor or noise; notes those where nothing is left."""
    state, device = batch.sampling, logits.device
    masks = _mask_rows(mask, batch.vocab_size)
    wants = state.wants[positions.slots]
    needs = ((wants & PROCESSORS) != 0) | (positions.lengths < state.first_free_stop[positions.slots])
    if masks:
        needs |= np.isin(positions.slots, list(masks))
    if errors:
        needs &= ~np.isin(positions.slots, list(errors))
    processed_rows = np.flatnonzero(needs)
    if len(processed_rows):
        processed = logits[torch.from_numpy(processed_rows).to(device)]
        apply_processors(processed, [_context(batch, positions, i, masks) for i in processed_rows.tolist()])
        greedy, largest = kernels.argmax(processed)
        _note_failures(largest, positions.slots[processed_rows], NOTHING_ALLOWED, errors)
        tokens[processed_rows] = greedy.cpu().numpy()
    place_of = np.full(len(positions), -1)
    place_of[processed_rows] = np.arange(len(processed_rows))

    random = (wants & RANDOM) != 0
    if errors:
        random &= ~np.isin(positions.slots, list(errors))
    for is_processed in (False, True):
        group = np.flatnonzero(random & ((place_of >= 0) == is_processed))
        if len(group):
            source = _rows_of(processed, place_of[group]) if is_processed else _rows_of(logits, group)
            draws = state.draws(positions.slots[group], positions.lengths[group], device)
            tokens[group] = kernels.sample(source, draws).cpu().numpy()


def _rows_of(logits: torch.Tensor, rows: Indices) -> torch.Tensor:
    """Some rows in ascending order; the tensor itself where they are all."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]


def _note_failures(largest: torch.Tensor, slots: Ints, message: str, errors: dict[int, str]) -> None:
    """Notes the slots whose largest logit is no finite number; it is NaN where any logit is."""
    is_good = np.isfinite(largest.cpu().numpy())
    if np.count_nonzero(is_good) < len(is_good):
        for slot in np.unique(slots[~is_good]).tolist():
            errors.setdefault(slot, message)


def _context(batch: Batch, positions: Positions, i: int, masks: dict[int, Ints]) -> RowContext:
    slot = int(positions.slots[i])
    mask = masks[slot][positions.places[i]] if slot in masks else None
    return RowContext(batch.request(slot), batch.token_ids[slot, : positions.lengths[i]], mask)


def _mask_rows(mask: GrammarMask | None, vocab_size: int) -> dict[int, Ints]:
    """Mask rows by slot, each [rows of the slot, words]."""
    if mask is None:
        return {}
    lines = mask.mask.reshape(-1, -(-vocab_size // 32))
    ends = np.cumsum(mask.num_mask_rows)
    parts = zip(mask.slots.tolist(), (ends - mask.num_mask_rows).tolist(), ends.tolist(), strict=True)
    return {slot: lines[start:end] for slot, start, end in parts}


def _accept_drafts(batch: Batch, rows: Rows, positions: Positions, tokens: Indices) -> Ints:
    """Per row the accepted drafts and one more; 0 where nothing was sampled."""
    assert rows.num_draft_tokens is not None
    emitted = np.minimum(rows.num_sampled_tokens, 1)
    for row in np.flatnonzero(rows.num_draft_tokens):
        slot, num_drafts = int(rows.slots[row]), int(rows.num_draft_tokens[row])
        start = int(batch.num_tokens[slot])
        drafts = batch.token_ids[slot, start : start + num_drafts]
        sampled = tokens[positions.rows == row][:num_drafts]
        is_equal = drafts == sampled
        emitted[row] = 1 + (num_drafts if is_equal.all() else int(is_equal.argmin()))
    return emitted


def _logprobs(
    logits: torch.Tensor,
    batch: Batch,
    rows: Rows,
    num_emitted: Ints,
    tokens: Indices,
    errors: dict[int, str],
    max_bytes: int,
) -> dict[int, LogprobColumns]:
    """Log-probabilities of the model's own distribution, before any processor and temperature (vLLM's default)."""
    found: dict[int, LogprobColumns] = {}
    starts = np.cumsum(rows.num_sampled_tokens) - rows.num_sampled_tokens
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    wants = (batch.sampling.wants[rows.slots] & LOGPROBS) != 0
    for row in np.flatnonzero(wants & (num_emitted > 0)).tolist():
        params = batch.request(int(rows.slots[row])).params
        groups.setdefault((params.logprobs or 0, params.logprob_token_ids), []).append(row)
    for (num_likeliest, extra), members in groups.items():
        width = 1 + (logits.shape[1] if num_likeliest < 0 else num_likeliest) + len(extra)
        fitting = []
        for row in members:
            num_bytes = int(num_emitted[row]) * width * 8
            if num_bytes > max_bytes:
                errors[int(rows.slots[row])] = "its log-probabilities do not fit into one message: ask for fewer"
            else:
                max_bytes -= num_bytes
                fitting.append(row)
        if fitting:
            index = np.concatenate([np.arange(starts[r], starts[r] + num_emitted[r]) for r in fitting])
            columns = logprob_columns(_rows_of(logits, index), tokens[index], num_likeliest, extra)
            ends = np.cumsum(num_emitted[fitting])
            for row, end in zip(fitting, ends.tolist(), strict=True):
                found[int(rows.slots[row])] = columns.rows(end - int(num_emitted[row]), end)
    return found


def logprob_columns(
    logits: torch.Tensor, chosen: npt.NDArray[np.integer], num_likeliest: int, extra: tuple[int, ...] = ()
) -> LogprobColumns:
    """Columns of chosen, likeliest and extra tokens for logits [positions, vocab_size]."""
    device = logits.device
    extra_ids = torch.tensor(extra, dtype=torch.int64, device=device) if extra else None
    chosen_ids = torch.from_numpy(chosen.astype(np.int64)).to(device)
    token_ids, values, ranks = kernels.gather_logprobs(logits, chosen_ids, num_likeliest, extra_ids)
    return LogprobColumns(
        token_ids.to(torch.int32).cpu().numpy(), values.cpu().numpy(), ranks.to(torch.int32).cpu().numpy()
    )
