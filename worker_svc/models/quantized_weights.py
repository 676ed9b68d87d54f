"""Weights that stay quantized: as a GGUF file holds them, or in 8 bits for any model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.matrix import Weight, new_weight
from kernels.packed_weight import PackedWeight, WeightPart
from kernels.quantized import GROUP, ChannelWeight, GroupedWeight
from worker_svc.models.gguf_files import BlockTensor

INT8, GGUF = "int8", "gguf"
QUANTIZATIONS = (INT8, GGUF)
_GROUPED = {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}
"""Bits, and whether a block has a minimum, of the types that are multiplied as they are."""
Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def new_int8_weight(
    part_sizes: Sequence[int], in_features: int, *, dtype: torch.dtype, device: torch.device, is_gated: bool = False
) -> Weight:
    """An unfilled weight of 8 bits with a scale per row; filling it quantizes."""
    return ChannelWeight(part_sizes, in_features, dtype, is_gated)


def new_gguf_weight(
    part_sizes: Sequence[int], in_features: int, *, dtype: torch.dtype, device: torch.device, is_gated: bool = False
) -> Weight:
    """An unfilled weight that becomes what its tensors are in the file."""
    return GgufWeight(part_sizes, in_features, dtype, is_gated)


def unpack_blocks(tensor: BlockTensor) -> Blocks:
    """Numbers [rows, in_features] uint8, scales and minima [rows, groups] float16, of a type in _GROUPED.

    A block of 32: scale, minimum (Q4_1), then 32 signed bytes, or 16 bytes whose low halves come first (ggml's layout).
    """
    bits, has_mins = _GROUPED[tensor.type_name]
    head = 4 if has_mins else 2
    blocks = tensor.blocks.unflatten(1, (-1, head + GROUP * bits // 8))
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    mins = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0] if has_mins else None
    numbers = blocks[..., head:]
    numbers = torch.cat([numbers & 15, numbers >> 4], dim=-1) if bits == 4 else numbers ^ 128
    return numbers.flatten(1), scales, mins


class GgufWeight(PackedWeight):
    """A weight whose parts come as blocks of a GGUF file.

    Parts of one type are kept in it; of several, all in 8 bits with minima, which holds each of them exactly; with a
    type that is not multiplied as it is, all in `dtype`. What it became is known when the last part has come.
    """

    def __init__(self, part_sizes: Sequence[int], in_features: int, dtype: torch.dtype, is_gated: bool = False) -> None:
        super().__init__(part_sizes, in_features, dtype, is_gated)
        self._tensors: list[torch.Tensor | BlockTensor | None] = [None] * len(part_sizes)
        self._inner: PackedWeight | None = None

    @property
    def inner(self) -> PackedWeight:
        """What it became. Raises RuntimeError before all parts are filled."""
        if self._inner is None:
            raise RuntimeError("a part of this weight was not filled")
        return self._inner

    def parts(self) -> list[WeightPart]:
        """See PackedWeight; a part takes a BlockTensor too."""
        return [self._part(i, size) for i, size in enumerate(self.part_sizes)]

    def _part(self, index: int, size: int) -> WeightPart:
        def fill(rows: torch.Tensor | BlockTensor) -> None:
            self._tensors[index] = rows
            if all(tensor is not None for tensor in self._tensors):
                self._become()

        return WeightPart((size, self.in_features), fill)

    def _become(self) -> None:
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        found = {tensor.type_name if isinstance(tensor, BlockTensor) else "" for tensor in tensors}
        if found <= set(_GROUPED):
            self._inner = self._grouped([tensor for tensor in tensors if isinstance(tensor, BlockTensor)], found)
        if self._inner is None:
            self._inner = self._dense(tensors)
        self._tensors = [None] * len(tensors)

    def _grouped(self, tensors: list[BlockTensor], found: set[str]) -> PackedWeight | None:
        bits, has_mins = _GROUPED[min(found)] if len(found) == 1 else (8, True)
        made = GroupedWeight(self.part_sizes, self.in_features, self.dtype, self.is_gated, bits=bits, has_mins=has_mins)
        for i, tensor in enumerate(tensors):
            numbers, scales, mins = unpack_blocks(tensor)
            if has_mins and mins is None:
                mins = scales * (-128 if _GROUPED[tensor.type_name][0] == 8 else -8)  # exact, or infinite
                if not mins.isfinite().all():
                    return None
            made.set_rows(i, numbers, scales, mins)
        return made

    def _dense(self, tensors: list[torch.Tensor | BlockTensor]) -> PackedWeight:
        device = torch.device("cpu")
        made = new_weight(self.part_sizes, self.in_features, dtype=self.dtype, device=device, is_gated=self.is_gated)
        if not isinstance(made, PackedWeight):
            raise RuntimeError("weights can't be packed here")
        for part, tensor in zip(made.parts(), tensors, strict=True):
            part.copy_(tensor.dequantized() if isinstance(tensor, BlockTensor) else tensor)
        return made

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See PackedWeight."""
        return self.inner.multiply(x, bias, out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See PackedWeight."""
        return self.inner.rows(ids)

    def unpacked(self) -> torch.Tensor:
        """See PackedWeight."""
        return self.inner.unpacked()

    @property
    def nbytes(self) -> int:
        """See PackedWeight."""
        return self.inner.nbytes
