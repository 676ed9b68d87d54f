"""Flattens the rows of a step into the model's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagewire.errors import InvalidArgumentError, violation
from worker_svc.batch import Batch, Rows
from worker_svc.models.interface import ForwardBatch
from worker_svc.ragged import has_repeats
from worker_svc.staging import Array, Staging, packed_bytes

MAX_EXTRA = 13
"""Columns over rows or sampled positions that may travel along."""


class InputBuffers:
    """The arrays that a batch's inputs are built in, for steps of any size: a step overwrites the one before it.

    On a CPU they stay where they are, so that steps with as many rows of one token each have inputs at the same
    addresses. Elsewhere they cross to the device together, in one copy (see Staging).
    """

    def __init__(self, batch: Batch, device: torch.device, *, is_staged: bool = False) -> None:
        """is_staged: takes the way to a device on a CPU too."""
        self._batch = batch
        num_tokens, num_rows = batch.max_num_batched_tokens, batch.max_num_seqs
        self._order = np.arange(max(num_tokens, num_rows + 1), dtype=np.int64)
        self._order32 = self._order.astype(np.int32)
        self._input_ids, self._positions, self._slot_mapping = np.empty((3, num_tokens), np.int64)
        self._query_start_loc = np.zeros(num_rows + 1, np.int32)
        self._seq_lens = np.empty(num_rows, np.int32)
        self._block_tables = np.zeros((num_rows, batch.max_blocks), np.int32)
        self._token_of_place = np.empty(batch.num_kv_blocks * batch.block_size, np.int32)
        sizes = [8 * num_tokens] * 3 + [4 * (num_rows + 1)] * 2 + [8 * max(num_tokens, num_rows + 1)] * MAX_EXTRA
        sizes.append(self._block_tables.nbytes)
        self._staging = None if device.type == "cpu" and not is_staged else Staging(packed_bytes(sizes), device)

    def build(self, rows: Rows) -> ForwardBatch:
        """See `stage`."""
        return self.stage(rows, [])[0]

    def stage(self, rows: Rows, extra: Sequence[Array]) -> tuple[ForwardBatch, list[torch.Tensor]]:
        """The ragged batch of the rows: token t of row r is at query_start_loc[r] + t. Valid until the next call.

        extra: at most MAX_EXTRA columns over rows or sampled positions that travel along; their tensors come second.

        Raises InvalidArgumentError where two tokens would write the same KV.
        """
        counts, num_rows = rows.num_scheduled_tokens, len(rows)
        num_tokens = int(np.add.reduce(counts, dtype=np.int64))
        positions = self._positions[:num_tokens]
        if num_tokens == num_rows:  # every row has one token
            query_start_loc, max_query_len = self._order32[: num_rows + 1], 1
            positions[:] = rows.num_computed_tokens
            slots = rows.slots.astype(np.int64)
        else:
            query_start_loc = self._query_start_loc[: num_rows + 1]
            np.cumsum(counts, out=query_start_loc[1:])
            offsets = np.repeat(rows.num_computed_tokens - query_start_loc[:-1], counts)
            np.add(self._order[:num_tokens], offsets, out=positions)
            slots, max_query_len = np.repeat(rows.slots.astype(np.int64), counts), int(counts.max())
        seq_lens = self._seq_lens[:num_rows]
        np.add(rows.num_computed_tokens, counts, out=seq_lens)
        max_seq_len = int(seq_lens.max())
        tables = self._block_tables[:num_rows, : -(-max_seq_len // self._batch.block_size)]
        tables[:] = self._batch.block_tables[rows.slots, : tables.shape[1]]
        arrays: dict[str, Array] = {
            "input_ids": self._token_ids(slots, positions),
            "positions": positions,
            "query_start_loc": query_start_loc,
            "seq_lens": seq_lens,
            "block_tables": tables,
            "slot_mapping": self._places(slots, positions),
        }
        tensors = self._tensors([*arrays.values(), *extra])
        batch = ForwardBatch(
            **dict(zip(arrays, tensors, strict=False)), max_query_len=max_query_len, max_seq_len=max_seq_len
        )
        return batch, tensors[len(arrays) :]

    def _token_ids(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        table, found = self._batch.token_ids, self._input_ids[: len(positions)]
        found[:] = table.ravel().take(slots * table.shape[1] + positions)
        return found

    def _places(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each token's KV goes."""
        table, places = self._batch.block_tables, self._slot_mapping[: len(positions)]
        block_size = self._batch.block_size
        columns = positions // block_size
        places[:] = table.ravel().take(slots * table.shape[1] + columns)
        # block * block_size + (position - column * block_size), in one multiplication less.
        places -= columns
        places *= block_size
        places += positions
        if has_repeats(places, self._token_of_place):
            raise InvalidArgumentError(
                [violation("plan.new_block_ids", "a block", "two tokens of the step would write the same place in it")],
                reason="BAD_PLAN",
            )
        return places

    def _tensors(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays] if self._staging is None else self._staging.stage(arrays)
