"""Copies and fills whole KV blocks before a step's forward pass, on its stream."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

import kernels
from worker_svc.models.interface import KvCaches
from worker_svc.staging import Array, Staging, packed_bytes

_FIRST_IDS = 1024
"""Ids that the first staging buffer holds; a step with more of them gets a larger one."""


class BlockMoves:
    """Belongs to the compute thread. Ids cross to the device in a staging buffer, and nobody waits for that."""

    def __init__(self, caches: KvCaches, device: torch.device, *, is_staged: bool) -> None:
        """is_staged: takes the way to a device; without, the arrays stay where they are."""
        self._caches, self._device, self._is_staged = caches, device, is_staged
        self._num_ids = 0
        self._staging: Staging | None = None

    def run(
        self, sources: npt.NDArray[np.int32], destinations: npt.NDArray[np.int32], zeros: npt.NDArray[np.int32]
    ) -> None:
        """Copies the blocks `sources` to `destinations`, all of them as they are before, then fills `zeros`."""
        ids = [column.astype(np.int64) for column in (sources, destinations, zeros)]
        on_device = self._staged(ids) if self._is_staged else [torch.from_numpy(column) for column in ids]
        for key_cache, value_cache in list.__iter__(self._caches):
            if len(sources):
                kernels.copy_blocks(key_cache, value_cache, on_device[0], on_device[1])
            if len(zeros):
                kernels.zero_blocks(key_cache, value_cache, on_device[2])

    def _staged(self, ids: list[Array]) -> list[torch.Tensor]:
        total = sum(len(column) for column in ids)
        if self._staging is None or total > self._num_ids:
            self._num_ids = max(_FIRST_IDS, 1 << (total - 1).bit_length())
            # Three columns, each aligned. Copies out of the old buffer end first: its memory is torch's to keep.
            self._staging = Staging(packed_bytes([8 * self._num_ids, 8, 8]), self._device)
        return self._staging.stage(ids)
