"""The call of a product with a quantized weight."""

from __future__ import annotations

import threading

import torch

from kernels.cpu import quant_gather, quant_linear
from kernels.cpu.call import Call
from kernels.cpu.lanes import KINDS as TYPES
from kernels.cpu.quant_tiles import tile_configuration
from kernels.cpu.recorder import empty, is_recording
from kernels.cpu.team import team

_ROW_TILE = 16
CHUNKS_PER_THREAD = 4
_local = threading.local()


def _scratch(num_bytes: int) -> int:
    """Address of so many bytes of this thread's own, aligned to 64; the next call may take the same."""
    if is_recording():
        return empty((num_bytes,), torch.uint8).data_ptr()
    memory = getattr(_local, "memory", None)
    if memory is None or memory.numel() < num_bytes + 64:
        memory = _local.memory = torch.empty(2 * num_bytes + 64, dtype=torch.uint8)
    return (int(memory.data_ptr()) + 63) & ~63


_multiply = Call(quant_linear.multiply, 16)


class QuantizedProduct:
    """The product with one quantized weight; its addresses are looked up once."""

    def __init__(self, address: int, description: tuple[int, ...]) -> None:
        self._words = torch.tensor([address, *description], dtype=torch.int64)
        self._in_features = description[2]
        self._num_pairs = description[1] // 2
        self._weight, self._team = self._words.data_ptr(), team()
        self._prepare, self._product = quant_linear.prepare_chunk.address, quant_linear.product_chunk.address
        self._tiles = tile_configuration()

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, record_bytes: int, has_tiles: bool
    ) -> None:
        """Fills out [num_rows, columns]; x [num_rows, in_features] in one run, at least one row."""
        num_rows = x.shape[0]
        num_chunks = min(self._num_pairs, CHUNKS_PER_THREAD * self._team.size)
        spare_bytes = 64 * self._in_features if has_tiles else 0
        records = -(-num_rows // _ROW_TILE) * _ROW_TILE * record_bytes
        _multiply(
            self._team.state,
            self._prepare,
            self._product,
            self._weight,
            x.data_ptr(),
            TYPES[x.dtype],
            num_rows,
            0 if bias is None else bias.data_ptr(),
            0 if bias is None else TYPES[bias.dtype],
            out.data_ptr(),
            TYPES[out.dtype],
            self._tiles.data_ptr() if has_tiles else 0,
            _scratch(records + num_chunks * spare_bytes),
            record_bytes,
            spare_bytes,
            num_chunks,
        )

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Fills out [n, in_features] with the weight's rows ids [n] int64; n is at least 1."""
        quant_gather.gather(self._weight, ids.data_ptr(), len(ids), TYPES[out.dtype], out.data_ptr())
