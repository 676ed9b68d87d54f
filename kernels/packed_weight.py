"""PackedWeight: a weight matrix in the layout that the product kernels of a CPU read, filled row range by row range."""

from __future__ import annotations

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from kernels.cpu.recorder import is_recording

PANEL = 16
"""Output features that lie together: the float32 lanes of a vector, the columns of a tile."""
ALIGNMENT = 64
SLAB_BYTES = 64 << 20


class WeightPart:
    """Some rows of a packed weight, as a checkpoint's tensor fills them: has what a tensor has for that.

    `fill(rows)` gets a tensor of exactly `shape`, of any float type.
    """

    def __init__(self, shape: tuple[int, int], fill: Callable[[torch.Tensor], None]) -> None:
        self.shape = torch.Size(shape)
        self._fill = fill

    def dim(self) -> int:
        """2."""
        return len(self.shape)

    def copy_(self, rows: torch.Tensor) -> None:
        """Packs the rows into their place."""
        if rows.shape != self.shape:
            raise ValueError(f"rows have shape {tuple(rows.shape)}, the part has {tuple(self.shape)}")
        self._fill(rows)


class PackedWeight(ABC):
    """A matrix [out_features, in_features] of one or several projections (parts) one below the other.

    `is_gated`: two parts of one size, gate and up, whose product is silu(gate) * up. Nothing is copied twice: a part is
    packed into the storage as it is read.
    """

    def __init__(self, part_sizes: Sequence[int], in_features: int, dtype: torch.dtype, is_gated: bool = False) -> None:
        if is_gated and (len(part_sizes) != 2 or part_sizes[0] != part_sizes[1]):
            raise ValueError(f"a gated weight has two parts of one size, not {list(part_sizes)}")
        self.part_sizes, self.in_features = tuple(part_sizes), in_features
        self.shape = torch.Size((sum(part_sizes), in_features))
        self.dtype = dtype
        """Of x and of the product."""
        self.is_gated = is_gated
        self.device = torch.device("cpu")

    @abstractmethod
    def parts(self) -> list[WeightPart]:
        """One per projection, in order."""

    @abstractmethod
    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias for x [num_rows, in_features]; [num_rows, out_features], halved where gated.

        A row's result has the same bits whatever the number of rows. bias [out_features] of the weight's type, gate
        first. out_dtype: the weight's, or float32.
        """

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows ids [n] int64 of the matrix in `dtype`: the embedding, where it is also the output matrix."""

    def _check_rows(self, ids: torch.Tensor) -> None:
        """Raises IndexError for an id outside the matrix. A recorded program runs again with ids checked elsewhere."""
        if is_recording():
            return
        low, high = torch.aminmax(ids)
        if low < 0 or high >= self.shape[0]:
            raise IndexError(f"ids lie in [{int(low)}, {int(high)}], the matrix has {self.shape[0]} rows")

    @abstractmethod
    def unpacked(self) -> torch.Tensor:
        """The matrix [out_features, in_features] in `dtype`, a copy."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the storage."""

    def fill(self, matrix: torch.Tensor) -> None:
        """Packs a whole matrix [out_features, in_features]."""
        for part, rows in zip(self.parts(), matrix.split(list(self.part_sizes)), strict=True):
            part.copy_(rows)


_slab: weakref.ref[mmap.mmap] | None = None
_used = 0


def allocate(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 [num_bytes], aligned to 64 bytes, in huge pages where the system has them.

    Weights share slabs: most are smaller than a huge page. A slab is given back when its last weight is gone.
    """
    global _slab, _used
    slab = None if _slab is None else _slab()
    if slab is None or _used + num_bytes > len(slab):
        slab, _used = mmap.mmap(-1, max(num_bytes, SLAB_BYTES)), 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        _slab = weakref.ref(slab)
    start = _used
    _used = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
    return torch.frombuffer(slab, dtype=torch.uint8, offset=start, count=num_bytes)
