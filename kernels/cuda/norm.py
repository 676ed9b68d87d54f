"""rms_norm in Triton: a program does one row, at once where the row fits into a block and else in two passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import FLOATS, Variant

MAX_BLOCK = 8192
"""Numbers of a row that a program holds in registers."""


@triton.jit
def _sum_with_residual(x, residual, place, is_inside):  # type: ignore[no-untyped-def]
    """x, or x + residual as x's type has it, in float32."""
    values = tl.load(x + place, is_inside, 0.0)
    total = values.to(tl.float32)
    if residual is not None:
        total += tl.load(residual + place, is_inside, 0.0).to(tl.float32)
    return total.to(values.dtype).to(tl.float32)


@triton.jit
def _store_normalized(out, weight, place, columns, is_inside, total, inverse):  # type: ignore[no-untyped-def]
    kind = out.dtype.element_ty
    # Rounded before the weight, as in the models' own code.
    values = (total * inverse).to(kind).to(tl.float32)
    scaled = values * tl.load(weight + columns, is_inside, 0.0).to(tl.float32)
    tl.store(out + place, scaled.to(kind), is_inside)


@triton.jit
def _rms_norm(x, residual, weight, out, size, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * size + columns
    is_inside = columns < size
    total = _sum_with_residual(x, residual, place, is_inside)
    inverse = tl.rsqrt(tl.sum(total * total, axis=0) / size + eps)
    # Threads may share an element of a short row: none stores it, in place, before all have loaded it.
    tl.debug_barrier()
    if residual is not None:
        tl.store(residual + place, total.to(residual.dtype.element_ty), is_inside)
    _store_normalized(out, weight, place, columns, is_inside, total, inverse)


@triton.jit
def _rms_norm_of_long_rows(x, residual, weight, out, size, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * size
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_inside = columns < size
        total = _sum_with_residual(x, residual, row + columns, is_inside)
        squares += total * total
        if residual is not None:
            tl.store(residual + row + columns, total.to(residual.dtype.element_ty), is_inside)
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / size + eps)
    tl.debug_barrier()  # the sums are read back, perhaps by other threads
    sums = x
    if residual is not None:
        sums = residual
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_inside = columns < size
        total = tl.load(sums + row + columns, is_inside, 0.0).to(tl.float32)
        _store_normalized(out, weight, row + columns, columns, is_inside, total, inverse)


def can_normalize(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether all are of one type, and rows follow one another."""
    tensors = [x, weight] if residual is None else [x, weight, residual]
    return all(tensor.dtype is x.dtype and tensor.is_contiguous() for tensor in tensors)


def num_warps(block: int) -> int:
    """Eight numbers or more per thread, sixteen for long rows."""
    return min(16, max(1, block // 256))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.norm.reference`; all what `can_normalize` allows."""
    out = torch.empty_like(x) if residual is None else x
    size = x.shape[-1]
    if x.numel():
        block = min(triton.next_power_of_2(size), MAX_BLOCK)
        kernel = _rms_norm if size <= MAX_BLOCK else _rms_norm_of_long_rows
        kernel[(x.numel() // size,)](x, residual, weight, out, size, eps, BLOCK=block, num_warps=num_warps(block))
    return out, x if residual is None else residual


def variants() -> list[Variant]:
    """Of rows of 576, 4096, 8192 and 16384, with and without a residual."""
    found = []
    for kind in FLOATS:
        for size in (576, 4096, 8192, 16384):
            for name, residual in (("", None), (" residual", f"*{kind}")):
                types = {"x": f"*{kind}", "weight": f"*{kind}", "out": f"*{kind}", "size": "i32", "eps": "fp32"}
                block = min(triton.next_power_of_2(size), MAX_BLOCK)
                constants = {"BLOCK": block} | ({"residual": None} if residual is None else {})
                found.append(
                    Variant(
                        f"rms_norm {kind} {size}{name}",
                        _rms_norm if size <= MAX_BLOCK else _rms_norm_of_long_rows,
                        types | ({"residual": residual} if residual is not None else {}),
                        constants,
                        num_warps=num_warps(block),
                        aligned=frozenset(("size",)),
                    )
                )
    return found
