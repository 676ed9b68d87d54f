"""Quantized weights: matrices of 4 or 8 bits per number, multiplied as integers.

GroupedWeight has a scale, or a scale and a minimum, per row and 32 numbers: what GGUF's Q4_0, Q4_1 and Q8_0 hold.
ChannelWeight has 8 bits and one scale per row. Activations become signed bytes as they come, with a scale per group or
per row. Sums of products are exact integers until the scales are applied, in one order, so that a row's result does not
depend on the batch; save where GroupedWeight multiplies many rows in bfloat16 (see TILES_FROM).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.cpu.features import isa
from kernels.cpu.recorder import empty
from kernels.packed_weight import PANEL, PackedWeight, WeightPart, allocate

if TYPE_CHECKING:
    from kernels.cpu.quant_products import QuantizedProduct

GROUP = 32
LINE = 64
MOST = 127
_CHUNK_ROWS = 4096


def quantize_activations(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [num_rows, size] as integers in [-127, 127], float32, and their scales [num_rows, size / group].

    The largest of a group becomes 127; rounding is to nearest, ties to even.
    """
    groups = x.float().unflatten(-1, (-1, group))
    most = groups.abs().amax(dim=-1)
    factors = torch.where(most > 0, MOST / most, 0.0)
    return (groups * factors[..., None]).round().flatten(-2), most / MOST


def reference(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `multiply` gives in float32, written for reading.

    Per group of the weight (one for a ChannelWeight): the integer product, times the activation's scale, times the
    weight's, plus the minimum times the activation's sum. Where the weight is gated: silu(gate) * up.
    """
    numbers, scales, mins = weight.numbers_and_scales()
    group = weight.in_features // scales.shape[1]
    values, x_scales = quantize_activations(x, group)
    out = torch.zeros(x.shape[0], weight.shape[0])
    for g in range(scales.shape[1]):
        of_group = slice(g * group, (g + 1) * group)
        dots = values[:, of_group].double() @ numbers[:, of_group].double().T
        out += dots.float() * x_scales[:, g, None] * scales[:, g]
        if mins is not None:
            sums = x_scales[:, g] * values[:, of_group].sum(dim=1)
            out += sums[:, None] * mins[:, g]
    out = out if bias is None else out + bias.float()
    if weight.is_gated:
        gate, up = out.split(list(weight.part_sizes), dim=1)
        return F.silu(gate) * up
    return out


class QuantizedWeight(PackedWeight):
    """A PackedWeight of quantized numbers.

    Storage: panels of 16 rows, each its scales (and minima) and then its numbers, see kernels/cpu/quant_dots.py. Where
    the weight is gated, panels of gate and up lie by turns.
    """

    TILES_FROM: int
    """Fewest rows that AMX tiles multiply; fewer go through dot products of vectors."""
    zero: int
    """The number that stands for 0."""

    def __init__(
        self,
        part_sizes: Sequence[int],
        in_features: int,
        dtype: torch.dtype,
        is_gated: bool,
        kind: int,
        panel_bytes: int,
    ) -> None:
        super().__init__(part_sizes, in_features, dtype, is_gated)
        if in_features > (1 << 31) // (255 * MOST):
            raise ValueError(f"in_features is {in_features}: a sum of products does not fit 32 bits")
        pairs = -(-part_sizes[0] // PANEL) if is_gated else -(-self.shape[0] // (2 * PANEL))
        self._columns = part_sizes[0] if is_gated else self.shape[0]
        self._x_features = -(-in_features // PANEL) * PANEL
        self._storage = allocate(2 * pairs * panel_bytes).view(2 * pairs, panel_bytes)
        self._description = (panel_bytes, 2 * pairs, self._x_features, kind, self.zero, int(is_gated), self._columns)
        self._product = self._make_product()

    @abstractmethod
    def numbers_and_scales(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Numbers less `zero` [rows, in_features], scales and minima [rows, groups]; float32 copies."""

    @abstractmethod
    def record_bytes(self, has_tiles: bool) -> int:
        """Scratch that an activation takes."""

    @abstractmethod
    def _quantize(self, places: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        """Fills rows, whose panels and lanes are given, from float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self._storage.numel()

    def parts(self) -> list[WeightPart]:
        """One per projection, in order."""
        return [self._part(i, size) for i, size in enumerate(self.part_sizes)]

    def _part(self, index: int, size: int) -> WeightPart:
        def fill(rows: torch.Tensor) -> None:
            for start in range(0, size, _CHUNK_ROWS):
                some = rows[start : start + _CHUNK_ROWS].float()
                self._quantize(self._places(index, start, len(some)), some)

        return WeightPart((size, self.in_features), fill)

    def _places(self, part: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Panel and lane of rows of a part."""
        rows = torch.arange(start, start + count)
        if self.is_gated:
            return rows // PANEL * 2 + part, rows % PANEL
        rows += sum(self.part_sizes[:part])
        return rows // PANEL, rows % PANEL

    def _all_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = [self._places(i, 0, size) for i, size in enumerate(self.part_sizes)]
        return torch.cat([panels for panels, _ in places]), torch.cat([lanes for _, lanes in places])

    def unpacked(self) -> torch.Tensor:
        """See PackedWeight."""
        return _dequantized(*self.numbers_and_scales()).to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See PackedWeight. Raises IndexError for an id outside the matrix."""
        if self.is_gated:
            return self.unpacked()[ids]
        out = empty((len(ids), self._x_features), self.dtype)
        if len(ids):
            self._check_rows(ids)
            self._product.gather(ids.to(torch.int64).contiguous(), out)
        return out if self._x_features == self.in_features else out[:, : self.in_features].contiguous()

    def _make_product(self) -> QuantizedProduct:
        from kernels.cpu.quant_products import QuantizedProduct

        return QuantizedProduct(self._storage.data_ptr(), self._description)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See PackedWeight."""
        out = empty((x.shape[0], self._columns), out_dtype or self.dtype)
        if self._x_features != self.in_features:
            x = F.pad(x, (0, self._x_features - self.in_features))
        elif not x.is_contiguous():
            x = x.contiguous()
        if len(x):
            has_tiles = x.shape[0] >= self.TILES_FROM and isa() == "amx"
            self._product.multiply(x, bias, out, self.record_bytes(has_tiles), has_tiles)
        return out


class GroupedWeight(QuantizedWeight):
    """4 or 8 bits with a float16 scale, or a scale and a minimum, per row and 32 numbers.

    A number u means scale * (u - 8) in 4 bits, scale * (u - 128) in 8, scale * u + minimum where there are minima.
    in_features is a multiple of 32.
    """

    TILES_FROM = 16
    """From here a panel is unpacked to bfloat16 once and multiplied in tiles. Microseconds for the four products of a
    layer of SmolLM2-135M in Q4_1, one thread, Xeon with AMX, least of 60: 1 row 120 by dot products (615 by tiles),
    8 rows 345 (629), 12 rows 478 (618), 16 rows 607 (638), 32 rows 1279 (817), 256 rows 12742 (2218)."""

    def __init__(
        self,
        part_sizes: Sequence[int],
        in_features: int,
        dtype: torch.dtype,
        is_gated: bool = False,
        *,
        bits: int = 8,
        has_mins: bool = False,
    ) -> None:
        from kernels.cpu.quant_dots import KINDS

        if in_features % GROUP:
            raise ValueError(f"in_features is {in_features}: must be a multiple of {GROUP}")
        self.bits, self.has_mins = bits, has_mins
        self.zero = 0 if has_mins else 1 << bits - 1
        num_groups = in_features // GROUP
        block = _whole(2 * PANEL * num_groups)
        start = block * (2 if has_mins else 1)
        panel_bytes = start + PANEL * in_features * bits // 8
        super().__init__(part_sizes, in_features, dtype, is_gated, KINDS.index((bits, has_mins)), panel_bytes)

        def halves(first: int) -> torch.Tensor:
            of_panels = self._storage[:, first : first + 2 * PANEL * num_groups]
            return of_panels.view(torch.float16).unflatten(1, (num_groups, PANEL))

        self._scales, self._mins = halves(0), halves(block) if has_mins else None
        self._numbers = self._storage[:, start:].unflatten(1, (-1, PANEL, 4))

    def record_bytes(self, has_tiles: bool) -> int:
        """See QuantizedWeight."""
        # On tiles, an odd number of lines: an even one would put all activations to the same few sets of the cache.
        if has_tiles:
            return _whole(2 * self.in_features) | LINE
        return _whole(self.in_features + 12 * (self.in_features // GROUP))

    def set_rows(
        self, part: int, numbers: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None = None
    ) -> None:
        """Fills a part from what a file holds: numbers [rows, in_features] uint8, scales and minima [rows, groups]."""
        for start in range(0, len(numbers), _CHUNK_ROWS):
            some = slice(start, min(start + _CHUNK_ROWS, len(numbers)))
            places = self._places(part, start, some.stop - start)
            self._set(places, numbers[some], scales[some], None if mins is None else mins[some])

    def _set(
        self,
        places: tuple[torch.Tensor, torch.Tensor],
        numbers: torch.Tensor,
        scales: torch.Tensor,
        mins: torch.Tensor | None,
    ) -> None:
        panels, lanes = places
        if self.bits == 4:
            pairs = numbers.unflatten(1, (-1, 2, 4))
            self._numbers[panels, :, lanes] = pairs[:, :, 0] | pairs[:, :, 1] << 4
        else:
            self._numbers[panels, :, lanes] = numbers.unflatten(1, (-1, 4))
        self._scales[panels, :, lanes] = scales.half()
        if self._mins is not None and mins is not None:
            self._mins[panels, :, lanes] = mins.half()

    def _quantize(self, places: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        groups = rows.unflatten(1, (-1, GROUP))
        if self.has_mins:
            mins = groups.amin(dim=-1).half()
            scales = ((groups.amax(dim=-1) - mins.float()) / (2**self.bits - 1)).half()
            offset = mins.float()
        else:
            mins = None
            scales = (groups.abs().amax(dim=-1) / (self.zero - 1)).half()
            offset = -self.zero * scales.float()
        steps = torch.where(scales > 0, 1 / scales.float(), 0.0)[..., None]
        numbers = ((groups - offset[..., None]) * steps).round().clamp(0, 2**self.bits - 1)
        self._set(places, numbers.flatten(1).to(torch.uint8), scales, mins)

    def _rows(
        self, panels: torch.Tensor, lanes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        numbers = self._numbers[panels, :, lanes]
        if self.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=2)
        mins = None if self._mins is None else self._mins[panels, :, lanes].float()
        return numbers.flatten(1).float() - self.zero, self._scales[panels, :, lanes].float(), mins

    def numbers_and_scales(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See QuantizedWeight."""
        return self._rows(*self._all_places())


class ChannelWeight(QuantizedWeight):
    """8 bits with a float32 scale per row, symmetric: a number u means scale * (u - 128)."""

    TILES_FROM = 4
    """The same bits either way. As for GroupedWeight: 1 row 172 us by dot products (182 by tiles), 2 rows 174 (188),
    4 rows 181 (190), 8 rows 257 (198), 32 rows 711 (243), 256 rows 5067 (1224)."""
    zero = 128

    def __init__(self, part_sizes: Sequence[int], in_features: int, dtype: torch.dtype, is_gated: bool = False) -> None:
        self._padded = _whole(in_features)
        super().__init__(part_sizes, in_features, dtype, is_gated, -1, LINE + PANEL * self._padded)
        self._scales = self._storage[:, :LINE].view(torch.float32)
        self._numbers = self._storage[:, LINE:].unflatten(1, (-1, PANEL, 4))

    def record_bytes(self, has_tiles: bool) -> int:
        """See QuantizedWeight."""
        return _whole(self._padded + 8) | LINE

    def _quantize(self, places: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        panels, lanes = places
        scales = rows.abs().amax(dim=1) / MOST
        steps = torch.where(scales > 0, 1 / scales, 0.0)[:, None]
        numbers = ((rows * steps).round().clamp(-MOST, MOST) + self.zero).to(torch.uint8)
        numbers = F.pad(numbers, (0, self._padded - self.in_features))
        self._scales[panels, lanes] = scales
        self._numbers[panels, :, lanes] = numbers.unflatten(1, (-1, 4))

    def _rows(self, panels: torch.Tensor, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        numbers = self._numbers[panels, :, lanes].flatten(1)[:, : self.in_features]
        return numbers.float() - self.zero, self._scales[panels, lanes, None], None

    def numbers_and_scales(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See QuantizedWeight."""
        return self._rows(*self._all_places())


def _dequantized(numbers: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None) -> torch.Tensor:
    groups = numbers.unflatten(-1, (scales.shape[1], -1)) * scales[..., None]
    return (groups if mins is None else groups + mins[..., None]).flatten(-2)


def _whole(count: int) -> int:
    return -(-count // LINE) * LINE
