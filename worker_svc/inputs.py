"""Flattens the rows of a step into the model's inputs."""

from __future__ import annotations

import numpy as np
import torch

from pagewire.errors import InvalidArgumentError, violation
from worker_svc.batch import Batch, Rows
from worker_svc.models.interface import ForwardBatch


def build_inputs(batch: Batch, rows: Rows, device: torch.device) -> ForwardBatch:
    """The ragged batch of the rows: token t of row r is at query_start_loc[r] + t.

    Raises InvalidArgumentError where two tokens would write the same KV.
    """
    counts = rows.num_scheduled_tokens
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    row = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(len(row)) + (rows.num_computed_tokens - query_start_loc[:-1])[row]
    seq_lens = rows.num_computed_tokens + counts
    slot_of_token = rows.slots[row]
    blocks = batch.block_tables[slot_of_token, positions // batch.block_size].astype(np.int64)
    slot_mapping = blocks * batch.block_size + positions % batch.block_size
    if len(np.unique(slot_mapping)) != len(slot_mapping):
        raise InvalidArgumentError(
            [violation("plan.new_block_ids", "a block", "two tokens of the step would write the same place in it")],
            reason="BAD_PLAN",
        )
    max_seq_len = int(seq_lens.max())
    width = -(-max_seq_len // batch.block_size)
    tables = batch.block_tables[rows.slots, :width]
    # Behind a row's own blocks the table may hold what an earlier request of the slot left.
    tables[np.arange(width) >= batch.num_blocks[rows.slots][:, None]] = 0

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        input_ids=tensor(batch.token_ids[slot_of_token, positions].astype(np.int64)),
        positions=tensor(positions),
        query_start_loc=tensor(query_start_loc),
        seq_lens=tensor(seq_lens),
        block_tables=tensor(tables),
        slot_mapping=tensor(slot_mapping),
        max_query_len=int(counts.max()),
        max_seq_len=max_seq_len,
    )
