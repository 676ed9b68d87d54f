"""Products by AMX tiles for kernels: 32 activations times 32 weight rows, in int8 or in bfloat16.

A tile is 16 rows of 64 bytes. Panels (see quant_dots) are tiles as they lie: 16 weight rows side by side, four bytes of
each. Only for processors whose `features.isa()` is amx; the state of the tiles belongs to the thread that configured.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.quant_dots import KINDS, fma, fours_of_group, load_half, offset, one_of, parts_of_panel
from kernels.cpu.tiles import BYTES, call_tile
from kernels.cpu.vectors import I64, V_F32, V_I32, constant, pointer, round_to_bfloat16

TILE = 16
BLOCK = 2 * TILE
"""Activations and weight rows of one product."""


@functools.cache
def tile_configuration() -> torch.Tensor:
    """What `configure_tiles` loads: eight full tiles (Intel's manual, LDTILECFG)."""
    found = torch.zeros(64, dtype=torch.uint8)
    found[0] = 1
    found[16:32:2] = 64
    found[48:56] = TILE
    return found


@intrinsic  # type: ignore[untyped-decorator]
def configure_tiles(typing_context: Any, address: Any) -> Any:
    """Before the first tile product of a thread; its argument is the address of `tile_configuration`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_tile(builder, "ldtilecfg", builder.inttoptr(args[0], BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def release_tiles(typing_context: Any) -> Any:
    """After a thread's last tile product: the system then has no tiles to save."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def unpack_panel(typing_context: Any, kind: Any, panel: Any, num_groups: Any, out: Any) -> Any:
    """A grouped panel to bfloat16 [k / 2, 16 rows, 2], tiles as they lie.

    The index of its kind in KINDS, its address, its number of groups, the address of the result. Per number:
    number * scale + (minimum - zero * scale) in float32, then rounded.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind_, *rest = args
        one_of(builder, kind_, {n: lambda n=n: _unpack(builder, *KINDS[n], *rest) for n in range(len(KINDS))})  # type: ignore[misc]
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _unpack(builder: Any, bits: int, has_mins: bool, panel: Any, groups: Any, out: Any) -> None:
    mins, weights = parts_of_panel(builder, panel, groups, has_mins)
    with cgutils.for_range(builder, groups) as loop:
        g32, g1024 = (builder.shl(loop.index, ir.Constant(I64, n)) for n in (5, 10))
        scale = load_half(builder, builder.add(panel, g32))
        if has_mins:
            low = load_half(builder, builder.add(mins, g32))
        else:
            low = builder.fmul(scale, ir.Constant(V_F32, [-8.0 if bits == 4 else -128.0] * TILE))
        numbers = builder.add(weights, builder.shl(loop.index, ir.Constant(I64, 8 if bits == 4 else 9)))
        group_out = builder.add(out, g1024)
        for i, four in enumerate(fours_of_group(builder, numbers, bits)):
            halves = []
            for place in range(4):
                number = builder.and_(builder.lshr(four, constant(8 * place)), constant(255))
                value = fma(builder, builder.sitofp(number, V_F32), scale, low)
                halves.append(builder.zext(round_to_bfloat16(builder, value), V_I32))
            for pair in range(2):
                both = builder.or_(halves[2 * pair], builder.shl(halves[2 * pair + 1], constant(16)))
                builder.store(both, pointer(builder, offset(builder, group_out, 64 * (2 * i + pair)), V_I32)).align = 4
