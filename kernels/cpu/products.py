"""Which product kernel a weight takes, and the call of it.

One kernel for all numbers of rows of a type, because tiles, dot products and plain multiply-adds round differently: a
row must have the same bits in every batch. Measured: milliseconds for all 121 products of SmolLM2-135M in bfloat16, two
threads of a shared Sapphire Rapids, whose speed changes twofold from minute to minute; the least of 7 to 9. amx and
torch alternated in one run, the gate's product among them (torch without it). avx512 and generic ran apart and
earlier, so compare those two with each other only:

    rows        1     2     4     8    16    32    64   128   256
    amx      17.8  16.6  17.8  17.7  19.7  22.0  28.5  32.6  62.8
    avx512   15.1        19.4  26.7        73.2         250
    generic  12.5        14.5  22.4        62.6         223
    torch    27.1  24.7  31.1  31.7  33.5  41.8  32.9  39.6  97.7   (oneDNN, with tiles)

A kernel of dot products of pairs, its data in the first-level cache, gives 85 GFLOP/s a thread there, one of float32
multiply-adds 167: avx512 gains nothing over generic on that processor. Other processors were not measured.
"""

from __future__ import annotations

import torch

from kernels.cpu import features, product, rows
from kernels.cpu.call import Call
from kernels.cpu.dots import PAIRS
from kernels.cpu.lanes import KINDS
from kernels.cpu.product_tiles import tile_chunk
from kernels.cpu.team import team

_multiply = Call(product.multiply, 6)


class Product:
    """The product with one packed weight; its addresses are looked up once."""

    def __init__(
        self,
        address: int,
        panel_bytes: int,
        num_panels: int,
        padded_k: int,
        num_columns: int,
        is_gated: bool,
        dtype: torch.dtype,
    ) -> None:
        element, chunk = KINDS[dtype], product.vector_chunk
        if dtype == torch.bfloat16 and features.isa() != "generic":
            element = PAIRS
            chunk = tile_chunk if features.isa() == "amx" else chunk
        steps = padded_k // (1 if dtype == torch.float32 else 2)
        self._address, self._panel_bytes = address, panel_bytes
        the_team = team()
        words = [address, panel_bytes, num_panels, steps, num_columns, int(is_gated), element]
        words += [KINDS[dtype], padded_k * dtype.itemsize, chunk.address, the_team.state, the_team.size]
        self._words = torch.tensor(words, dtype=torch.int64)
        self._weight = self._words.data_ptr()

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, num_rows: int, is_float32: bool
    ) -> None:
        """Fills out [num_rows, num_columns], of the weight's type or float32; x [num_rows, padded k]; both contiguous.

        At least one row.
        """
        _multiply(
            self._weight,
            x.data_ptr(),
            num_rows,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            is_float32,
        )

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Fills out [n, padded k] with the weight's rows ids [n] int64; n is at least 1."""
        words = out.shape[1] * out.element_size() // 4
        rows.gather(ids.data_ptr(), len(ids), self._address, self._panel_bytes, words, out.data_ptr())


def warm_up(dtype: torch.dtype) -> None:
    """Compiles what a weight of a type needs."""
    from kernels.float_weight import FloatWeight

    weight = FloatWeight([32], 32, dtype)
    weight.multiply(weight.rows(torch.zeros(1, dtype=torch.int64)))
