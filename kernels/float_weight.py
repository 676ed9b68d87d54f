"""FloatWeight: a packed weight of float32, bfloat16 or float16, and its products on a CPU.

Layout: panels of 32 output features; in a panel, k after k (float32) or pair of k after pair, each with its 32 features
beside each other. Gated: 16 features of the gate, then the same 16 of up. What is missing to a whole panel, or to a
multiple of 32 in k, is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kernels.cpu.recorder import empty
from kernels.packed_weight import PackedWeight, WeightPart, allocate

PANEL = 32
K_MULTIPLE = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FloatWeight(PackedWeight):
    """See the module."""

    def __init__(self, part_sizes: Sequence[int], in_features: int, dtype: torch.dtype, is_gated: bool = False) -> None:
        from kernels.cpu import products

        super().__init__(part_sizes, in_features, dtype, is_gated)
        self._group = 1 if dtype == torch.float32 else 2
        self._padded_k = -(-in_features // K_MULTIPLE) * K_MULTIPLE
        self._num_columns = part_sizes[0] if is_gated else self.shape[0]
        num_panels = -(-self._num_columns // (PANEL // 2 if is_gated else PANEL))
        panel_bytes = PANEL * self._padded_k * dtype.itemsize
        self._storage = allocate(num_panels * panel_bytes)
        self._panels = self._storage.view(dtype).view(num_panels, self._padded_k // self._group, PANEL, self._group)
        self._product = products.Product(
            self._storage.data_ptr(), panel_bytes, num_panels, self._padded_k, self._num_columns, is_gated, dtype
        )

    def parts(self) -> list[WeightPart]:
        """One per projection, in order."""
        found, first = [], 0
        for number, size in enumerate(self.part_sizes):
            half, start = (number, 0) if self.is_gated else (0, first)
            found.append(WeightPart((size, self.in_features), partial(self._pack, half, start)))
            first += size
        return found

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See PackedWeight."""
        if x.dtype != self.dtype or x.shape[1] != self.in_features:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight is {self.dtype} {tuple(self.shape)}")
        if self._padded_k != self.in_features:
            x = F.pad(x, (0, self._padded_k - self.in_features))
        elif not x.is_contiguous():
            x = x.contiguous()
        if bias is not None and self._num_columns % PANEL:
            bias = F.pad(bias, (0, PANEL))  # read by whole vectors
        num_rows = x.shape[0]
        out = empty((num_rows, self._num_columns), out_dtype or self.dtype)
        if num_rows:
            self._product.multiply(x, bias, out, num_rows, out_dtype is torch.float32)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See PackedWeight. Raises IndexError for an id outside the matrix."""
        if self.is_gated:
            return self.unpacked()[ids]
        num_ids = len(ids)
        out = empty((num_ids, self._padded_k), self.dtype)
        if num_ids:
            self._check_rows(ids)
            self._product.gather(ids.to(torch.int64).contiguous(), out)
        return out if self._padded_k == self.in_features else out[:, : self.in_features].contiguous()

    def unpacked(self) -> torch.Tensor:
        """See PackedWeight."""
        half = PANEL // 2
        panels = self._panels.permute(0, 2, 1, 3).reshape(-1, PANEL, self._padded_k)[:, :, : self.in_features]
        if not self.is_gated:
            return panels.reshape(-1, self.in_features)[: self.shape[0]].clone()
        gate, up = (panels[:, i * half : (i + 1) * half].reshape(-1, self.in_features) for i in range(2))
        return torch.cat([gate[: self._num_columns], up[: self._num_columns]])

    def __deepcopy__(self, memo: dict[int, object]) -> FloatWeight:
        copied = FloatWeight(self.part_sizes, self.in_features, self.dtype, self.is_gated)
        copied._storage.copy_(self._storage)
        return copied

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self._storage.numel()

    def _pack(self, half: int, first: int, rows: torch.Tensor) -> None:
        """Puts rows to the features from `first` on; half: 0 or 1 in a gated weight's panels."""
        width = PANEL // 2 if self.is_gated else PANEL
        start = 0
        while start < len(rows):
            panel, lane = divmod(first + start, width)
            whole = 0 if lane else (len(rows) - start) // width
            count = whole * width or min(width - lane, len(rows) - start)
            some = rows[start : start + count].to(self.dtype)
            if self._padded_k != self.in_features:
                some = F.pad(some, (0, self._padded_k - self.in_features))
            some = some.reshape(max(whole, 1), -1, self._padded_k // self._group, self._group)
            lanes = slice(half * width + lane, half * width + lane + some.shape[1])
            self._panels[panel : panel + max(whole, 1), :, lanes].copy_(some.transpose(1, 2))
            start += count
