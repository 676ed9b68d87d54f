"""silu_and_mul, gelu_and_mul and gelu_tanh_and_mul in Triton: a program does some columns of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import FLOATS, Variant

BLOCK = 1024


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):  # type: ignore[no-untyped-def]
    # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)); 1.5957... is 2 sqrt(2 / pi). From 80 on the result is nothing.
    return x / (1.0 + tl.exp(tl.minimum(-1.5957691216057308 * (x + 0.044715 * x * x * x), 80.0)))


@triton.jit
def _activate_and_mul(gate_up, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    gate = tl.load(gate_up + token * 2 * size + columns, is_inside, 0.0)
    up = tl.load(gate_up + token * 2 * size + size + columns, is_inside, 0.0)
    # Rounded to the type of its input before the product, as in the models' own code.
    activated = ACTIVATION(gate.to(tl.float32)).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * size + columns, product.to(gate.dtype), is_inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.activation.reference`."""
    return _run(gate_up, _silu)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.activation.reference_gelu`."""
    return _run(gate_up, _gelu)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.activation.reference_gelu_tanh`."""
    return _run(gate_up, _gelu_tanh)


def _run(gate_up: torch.Tensor, activation: triton.runtime.JITFunction) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _activate_and_mul[grid](gate_up.contiguous(), out, size, ACTIVATION=activation, BLOCK=BLOCK)
    return out


def variants() -> list[Variant]:
    """One per activation and type."""
    return [
        Variant(
            f"{name}_and_mul {kind}",
            _activate_and_mul,
            {"gate_up": f"*{kind}", "out": f"*{kind}", "size": "i32"},
            {"ACTIVATION": activation, "BLOCK": BLOCK},
            aligned=frozenset(("size",)),
        )
        for name, activation in (("silu", _silu), ("gelu", _gelu), ("gelu_tanh", _gelu_tanh))
        for kind in FLOATS
    ]
