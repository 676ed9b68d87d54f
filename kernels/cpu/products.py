"""Which product kernel a weight takes, and the call of it."""

from __future__ import annotations

import torch

from kernels.cpu import features, product
from kernels.cpu.dots import BFLOAT16, FLOAT16, FLOAT32, PAIRS
from kernels.cpu.team import team

_ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


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
        element, chunk = _ELEMENTS[dtype], product.vector_chunk
        if dtype == torch.bfloat16 and features.isa() != "generic":
            element = PAIRS
            chunk = product.tile_chunk if features.isa() == "amx" else chunk
        steps = padded_k // (1 if dtype == torch.float32 else 2)
        words = [address, panel_bytes, num_panels, steps, num_columns, int(is_gated), element]
        self._words = torch.tensor(words, dtype=torch.int64)
        self._weight, self._function, self._team = self._words.data_ptr(), chunk.address, team()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Fills out [num_rows, num_columns]; x [num_rows, padded k] with k in one run, at least one row."""
        team = self._team
        product.multiply(
            team.state,
            self._function,
            self._weight,
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            x.shape[0],
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.element_size(),
            _ELEMENTS[out.dtype],
            team.size,
        )
