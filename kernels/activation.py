"""silu_and_mul, gelu_and_mul and gelu_tanh_and_mul: the gates of gated feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.compiled import compiled_for_cuda


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, token by token.

    gate_up [num_tokens, 2 * size], gate first. Returns [num_tokens, size] in the same type; silu's result is rounded
    to that type before the product, as in the models' own code.
    """
    return _activate_and_mul(gate_up, lambda gate: gate / (1 + torch.exp(-gate)))


def reference_gelu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the exact GELU (Hendrycks and Gimpel, 2016); otherwise as `reference`."""
    return _activate_and_mul(gate_up, lambda gate: gate * (1 + torch.erf(gate / math.sqrt(2))) / 2)


def reference_gelu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the GELU approximated by tanh (Gemma's); otherwise as `reference`."""
    scale = math.sqrt(2 / math.pi)
    return _activate_and_mul(gate_up, lambda gate: gate * (1 + torch.tanh(scale * (gate + 0.044715 * gate**3))) / 2)


def torch_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def torch_gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference_gelu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def torch_gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference_gelu_tanh`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def cuda_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference`."""
    module = compiled_for_cuda("activation")
    return torch_silu_and_mul(gate_up) if module is None else module.silu_and_mul(gate_up)


def cuda_gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference_gelu`."""
    module = compiled_for_cuda("activation")
    return torch_gelu_and_mul(gate_up) if module is None else module.gelu_and_mul(gate_up)


def cuda_gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference_gelu_tanh`."""
    module = compiled_for_cuda("activation")
    return torch_gelu_tanh_and_mul(gate_up) if module is None else module.gelu_tanh_and_mul(gate_up)


def _activate_and_mul(gate_up: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(gate_up.shape[0], size, dtype=gate_up.dtype, device=gate_up.device)
    for t in range(gate_up.shape[0]):
        out[t] = activate(gate_up[t, :size].float()).to(gate_up.dtype) * gate_up[t, size:]
    return out
