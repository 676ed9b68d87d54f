"""Joins, trims and weighs step outputs: pure functions on columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pagewire.columns import EMPTY_INT32
from pagewire.engine import CoreStats, LogprobColumns, StepOutputs

MESSAGE_OVERHEAD_BYTES = 1024
"""What a StepOutputs costs in Python before its columns; keeps bounds in bytes honest for many small ones."""
ROW_EXTRA_BYTES = 128


def empty_outputs(step: int, stats: CoreStats | None = None) -> StepOutputs:
    """Outputs without rows, as a carrier of stats."""
    return StepOutputs(step, np.empty(0, np.uint64), EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, stats=stats)


def _logprobs_bytes(columns: LogprobColumns) -> int:
    return int(columns.token_ids.nbytes + columns.logprobs.nbytes + columns.ranks.nbytes) + ROW_EXTRA_BYTES


def outputs_bytes(outputs: StepOutputs) -> int:
    """About how many bytes of memory the outputs take; an upper bound of their size on the wire."""
    size = MESSAGE_OVERHEAD_BYTES + outputs.request_ids.nbytes + outputs.offsets.nbytes
    size += outputs.num_tokens.nbytes + outputs.token_ids.nbytes
    size += ROW_EXTRA_BYTES * (len(outputs.finished) + len(outputs.started))
    size += sum(len(finished.error_message) for finished in outputs.finished)
    size += sum(_logprobs_bytes(columns) for columns in outputs.logprobs.values())
    return size + sum(_logprobs_bytes(columns) for _, columns in outputs.prompt_logprobs.values())


def merge(parts: Sequence[StepOutputs]) -> StepOutputs:
    """One StepOutputs with the rows of all parts, in order; step, sequence and stats are the last ones given.

    A request that is in several parts has several rows, whose offsets tell where each belongs.
    """
    if len(parts) == 1:
        return parts[0]
    merged = StepOutputs(
        step=parts[-1].step,
        sequence=parts[-1].sequence,
        request_ids=np.concatenate([part.request_ids for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        num_tokens=np.concatenate([part.num_tokens for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
    )
    first_row = 0
    for part in parts:
        merged.finished.extend(replace(finished, row=finished.row + first_row) for finished in part.finished)
        merged.logprobs.update((row + first_row, columns) for row, columns in part.logprobs.items())
        merged.prompt_logprobs.update((row + first_row, entry) for row, entry in part.prompt_logprobs.items())
        merged.started.update((row + first_row, count) for row, count in part.started.items())
        if part.stats is not None:
            merged.stats = part.stats
        first_row += len(part.request_ids)
    return merged


def missing_part(outputs: StepOutputs, num_received: Mapping[int, int]) -> StepOutputs | None:
    """What of the outputs a frontend lacks that has `num_received[request_id]` tokens of each request; None: nothing.

    Rows of requests that are not named are left out, tokens that were received are cut off. A row without tokens
    (prompt log-probabilities of a chunk) is sent again: nothing tells whether it arrived, and a frontend takes it once.
    """
    starts = np.cumsum(outputs.num_tokens) - outputs.num_tokens
    finished = {entry.row: entry for entry in outputs.finished}
    kept = StepOutputs(outputs.step, outputs.request_ids[:0], EMPTY_INT32, EMPTY_INT32, EMPTY_INT32)
    ids: list[int] = []
    offsets: list[int] = []
    token_ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for row, request_id in enumerate(outputs.request_ids.tolist()):
        if request_id not in num_received:
            continue
        num_tokens = int(outputs.num_tokens[row])
        skip = min(max(num_received[request_id] - int(outputs.offsets[row]), 0), num_tokens)
        # A row comes whole or not at all: who has its tokens has its start and prompt log-probabilities.
        if skip == num_tokens and num_tokens > 0 and row not in finished:
            continue
        new_row = len(ids)
        ids.append(request_id)
        offsets.append(int(outputs.offsets[row]) + skip)
        token_ids.append(outputs.token_ids[starts[row] + skip : starts[row] + num_tokens])
        if row in finished:
            kept.finished.append(replace(finished[row], row=new_row))
        if row in outputs.logprobs and skip < num_tokens:
            kept.logprobs[new_row] = outputs.logprobs[row].rows(skip)
        if row in outputs.prompt_logprobs:
            kept.prompt_logprobs[new_row] = outputs.prompt_logprobs[row]
        if row in outputs.started:
            kept.started[new_row] = outputs.started[row]
    if not ids:
        return None
    kept.request_ids = np.array(ids, np.uint64)
    kept.offsets = np.array(offsets, np.int32)
    kept.num_tokens = np.array([len(tokens) for tokens in token_ids], np.int32)
    kept.token_ids = np.concatenate(token_ids)
    return kept
