"""rms_norm on a CPU: residual addition, statistics and weight in one call."""

from __future__ import annotations

import math
from typing import Any

import numba
import torch

from kernels.cpu import jit
from kernels.cpu.call import SharedCall
from kernels.cpu.lanes import KINDS, item_bytes, load, rounded, store
from kernels.cpu.recorder import empty
from kernels.cpu.vectors import BFLOAT16, FLOAT16, FLOAT32, fma, get_float32, get_int64, splat, sum_lanes

_X, _RESIDUAL, _WEIGHT, _OUT, _ROWS, _SIZE, _KIND, _ROWS_PER_CHUNK, _EPS = range(0, 72, 8)
_CHUNK_ELEMENTS = 1 << 14
"""Numbers that a thread takes at a time: waking another one for less costs more than it saves."""
_f32 = numba.float32


@jit.inlined
def inverse_root_mean_square(x: int, kind: int, size: int, eps: float) -> float:
    """1 / sqrt(mean of squares + eps) of `size` numbers, summed in one order."""
    squares = splat(_f32(0))
    for i in range(0, size, 16):
        values = load(kind, x + i * item_bytes(kind), size - i)
        squares = fma(values, values, squares)
    return _f32(1) / _f32(math.sqrt(sum_lanes(squares) / _f32(size) + eps))


@jit.inlined
def scale_row(x: int, weight: int, out: int, kind: int, size: int, inverse: float) -> None:
    """out = weight * (x * inverse), rounded before the weight, as in the models' own code. x may be out."""
    for i in range(0, size, 16):
        offset = i * item_bytes(kind)
        values = rounded(kind, load(kind, x + offset, size - i) * splat(inverse))
        store(kind, out + offset, values * load(kind, weight + offset, size - i), size - i)


def _make_normalize(kind: int) -> Any:
    """For whole vectors of one kind: 512 rows of 576 bfloat16 take 139 us of a thread, 216 with checks per vector."""

    @jit.inlined
    def normalize_row(x, residual, weight, out, size, eps):  # type: ignore[no-untyped-def]
        bytes_each = 2 if kind != FLOAT32 else 4
        squares = splat(_f32(0))
        if residual != 0:
            for offset in range(0, size * bytes_each, 16 * bytes_each):
                total = rounded(kind, load(kind, x + offset, 16) + load(kind, residual + offset, 16))
                store(kind, residual + offset, total, 16)
                squares = fma(total, total, squares)
            x = residual
        else:
            for offset in range(0, size * bytes_each, 16 * bytes_each):
                values = load(kind, x + offset, 16)
                squares = fma(values, values, squares)
        inverse = splat(_f32(1) / _f32(math.sqrt(sum_lanes(squares) / _f32(size) + eps)))
        for offset in range(0, size * bytes_each, 16 * bytes_each):
            values = rounded(kind, load(kind, x + offset, 16) * inverse)
            store(kind, out + offset, values * load(kind, weight + offset, 16), 16)

    return normalize_row


_normalize_float32, _normalize_bfloat16, _normalize_float16 = (
    _make_normalize(kind) for kind in (FLOAT32, BFLOAT16, FLOAT16)
)


@jit.inlined
def _normalize_odd(x, residual, weight, out, size, eps, kind):  # type: ignore[no-untyped-def]
    if residual != 0:
        for i in range(0, size, 16):
            offset = i * item_bytes(kind)
            total = load(kind, x + offset, size - i) + load(kind, residual + offset, size - i)
            store(kind, residual + offset, total, size - i)
        x = residual
    scale_row(x, weight, out, kind, size, inverse_root_mean_square(x, kind, size, eps))


def _normalize_rows(args: int, chunk: int) -> None:
    kind, size, eps = get_int64(args + _KIND), get_int64(args + _SIZE), get_float32(args + _EPS)
    row_bytes, count = size * item_bytes(kind), get_int64(args + _ROWS_PER_CHUNK)
    weight = get_int64(args + _WEIGHT)
    for row in range(chunk * count, min((chunk + 1) * count, get_int64(args + _ROWS))):
        x, out = get_int64(args + _X) + row * row_bytes, get_int64(args + _OUT) + row * row_bytes
        residual = get_int64(args + _RESIDUAL)
        if residual != 0:
            residual += row * row_bytes
        if size % 16 != 0:
            _normalize_odd(x, residual, weight, out, size, eps, kind)
        elif kind == BFLOAT16:
            _normalize_bfloat16(x, residual, weight, out, size, eps)
        elif kind == FLOAT16:
            _normalize_float16(x, residual, weight, out, size, eps)
        else:
            _normalize_float32(x, residual, weight, out, size, eps)


_normalize = SharedCall(jit.chunks(_normalize_rows), 8, 1)


def can_normalize(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether all are contiguous and of one known type."""
    return (
        x.dtype in KINDS
        and weight.dtype is x.dtype
        and x.is_contiguous()
        and (residual is None or (residual.dtype is x.dtype and residual.is_contiguous()))
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.norm.reference`; all what `can_normalize` allows."""
    out = empty(tuple(x.shape), x.dtype) if residual is None else x
    size, num_elements = weight.shape[0], x.numel()
    rows = num_elements // size
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // size)
    num_chunks = -(-rows // rows_per_chunk)
    _normalize(
        num_chunks,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        KINDS[x.dtype],
        rows_per_chunk,
        eps,
    )
    return out, x if residual is None else residual
