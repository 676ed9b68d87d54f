"""silu_and_mul in Triton: a program does some columns of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import FLOATS, Variant

BLOCK = 1024


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    gate = tl.load(gate_up + token * 2 * size + columns, is_inside, 0.0)
    up = tl.load(gate_up + token * 2 * size + size + columns, is_inside, 0.0)
    x = gate.to(tl.float32)
    # silu is rounded to the type of its input before the product, as in the models' own code.
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    tl.store(out + token * size + columns, silu * up, is_inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.activation.reference`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_and_mul[(num_tokens, triton.cdiv(size, BLOCK))](gate_up.contiguous(), out, size, BLOCK=BLOCK)
    return out


def variants() -> list[Variant]:
    """One per type."""
    return [
        Variant(f"silu_and_mul {name}", _silu_and_mul, {"gate_up": f"*{name}", "out": f"*{name}", "size": "i32"}, {"BLOCK": BLOCK})
        for name in FLOATS
    ]
