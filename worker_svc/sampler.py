"""From logits to tokens: processors, greedy or noise, acceptance of drafts, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import sampling
from kernels.logprobs import gather_logprobs
from pagewire.engine import LogprobColumns
from pagewire.plan import GrammarMask
from worker_svc.batch import Batch, Rows
from worker_svc.processors import RowContext, apply_processors

Ints = npt.NDArray[np.int32]
NOT_NUMBERS = "the model's logits are not numbers"
NOTHING_ALLOWED = "the logits processors forbid every token"


@dataclass(slots=True)
class Positions:
    """Where a step samples: one entry per sampled position, the positions of a row one after another."""

    rows: npt.NDArray[np.int64]
    """Row of each position."""
    slots: Ints
    lengths: npt.NDArray[np.int64]
    """Tokens before the sampled one, drafts too."""
    places: npt.NDArray[np.int64]
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


def sampled_positions(batch: Batch, rows: Rows) -> Positions:
    """The last num_sampled_tokens positions of every row."""
    row = np.repeat(np.arange(len(rows)), rows.num_sampled_tokens)
    starts = np.cumsum(rows.num_sampled_tokens) - rows.num_sampled_tokens
    places = np.arange(len(row)) - starts[row]
    slots = rows.slots[row]
    return Positions(row, slots, batch.num_tokens[slots].astype(np.int64) + places, places)


def sample_rows(
    logits: torch.Tensor, batch: Batch, rows: Rows, positions: Positions, mask: GrammarMask | None, max_bytes: int
) -> Sampled:
    """Samples every position and accepts each row's drafts while they equal what was sampled.

    logits: float32 [positions, vocab_size], the model's own; not changed. max_bytes bounds the log-probabilities.
    """
    tokens, errors = _sample_positions(logits, batch, positions, mask)
    num_emitted = _num_emitted(batch, rows, positions, tokens, errors)
    logprobs = _logprobs(logits, batch, rows, num_emitted, tokens, errors, max_bytes)
    for row in np.flatnonzero(np.isin(rows.slots, list(errors))):
        num_emitted[row] = 0
    is_emitted = positions.places < num_emitted[positions.rows]
    return Sampled(num_emitted, tokens[is_emitted].astype(np.int32), errors, logprobs)


def _sample_positions(
    logits: torch.Tensor, batch: Batch, positions: Positions, mask: GrammarMask | None
) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
    state, device = batch.sampling, logits.device
    errors: dict[int, str] = {}
    tokens = sampling.greedy(logits)
    _note_failures(logits, tokens, positions.slots, NOT_NUMBERS, errors)

    masks = _mask_rows(mask, batch.vocab_size)
    needs = state.has_processors[positions.slots] | (positions.lengths < state.first_free_stop[positions.slots])
    if masks:
        needs |= np.isin(positions.slots, list(masks))
    processed_rows = np.flatnonzero(needs & ~np.isin(positions.slots, list(errors)))
    if len(processed_rows):
        index = torch.from_numpy(processed_rows).to(device)
        processed = logits[index]
        apply_processors(processed, [_context(batch, positions, i, masks) for i in processed_rows.tolist()])
        greedy = sampling.greedy(processed)
        _note_failures(processed, greedy, positions.slots[processed_rows], NOTHING_ALLOWED, errors)
        tokens[index] = greedy
    place_of = np.full(len(positions), -1)
    place_of[processed_rows] = np.arange(len(processed_rows))

    random = ~state.is_greedy[positions.slots] & ~np.isin(positions.slots, list(errors))
    for is_processed in (False, True):
        group = np.flatnonzero(random & ((place_of >= 0) == is_processed))
        if len(group):
            source = (
                processed[torch.from_numpy(place_of[group]).to(device)]
                if is_processed
                else logits[torch.from_numpy(group).to(device)]
            )
            draws = state.draws(positions.slots[group], positions.lengths[group], device)
            tokens[torch.from_numpy(group).to(device)] = sampling.sample(source, draws)
    return tokens.cpu().numpy(), errors


def _note_failures(
    logits: torch.Tensor, likeliest: torch.Tensor, slots: Ints, message: str, errors: dict[int, str]
) -> None:
    """Notes the slots whose largest logit is no finite number (argmax takes a NaN for the maximum)."""
    is_bad = ~logits.gather(1, likeliest[:, None]).flatten().isfinite()
    if bool(is_bad.any()):
        for slot in np.unique(slots[is_bad.cpu().numpy()]).tolist():
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


def _num_emitted(
    batch: Batch, rows: Rows, positions: Positions, tokens: npt.NDArray[np.int64], errors: dict[int, str]
) -> Ints:
    """Per row the accepted drafts and one more; 0 where nothing was sampled or the row failed."""
    emitted = np.minimum(rows.num_sampled_tokens, 1)
    for row in np.flatnonzero(rows.num_draft_tokens):
        slot, num_drafts = int(rows.slots[row]), int(rows.num_draft_tokens[row])
        start = int(batch.num_tokens[slot])
        drafts = batch.token_ids[slot, start : start + num_drafts]
        sampled = tokens[positions.rows == row][:num_drafts]
        is_equal = drafts == sampled
        emitted[row] = 1 + (num_drafts if is_equal.all() else int(is_equal.argmin()))
    emitted[np.isin(rows.slots, list(errors))] = 0
    return emitted


def _logprobs(
    logits: torch.Tensor,
    batch: Batch,
    rows: Rows,
    num_emitted: Ints,
    tokens: npt.NDArray[np.int64],
    errors: dict[int, str],
    max_bytes: int,
) -> dict[int, LogprobColumns]:
    """Log-probabilities of the model's own distribution, before any processor and temperature (vLLM's default)."""
    found: dict[int, LogprobColumns] = {}
    starts = np.cumsum(rows.num_sampled_tokens) - rows.num_sampled_tokens
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row in np.flatnonzero(batch.sampling.wants_logprobs[rows.slots] & (num_emitted > 0)).tolist():
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
            columns = logprob_columns(logits[torch.from_numpy(index)], tokens[index], num_likeliest, extra)
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
    token_ids, values, ranks = gather_logprobs(logits, chosen_ids, num_likeliest, extra_ids)
    return LogprobColumns(
        token_ids.to(torch.int32).cpu().numpy(), values.cpu().numpy(), ranks.to(torch.int32).cpu().numpy()
    )
