"""silu_and_mul: the gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.compiled import compiled_for_cuda


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, token by token.

    gate_up [num_tokens, 2 * size], gate first. Returns [num_tokens, size] in the same type; silu's result is rounded
    to that type before the product, as in the models' own code.
    """
    size = gate_up.shape[-1] // 2
    out = torch.empty(gate_up.shape[0], size, dtype=gate_up.dtype, device=gate_up.device)
    for t in range(gate_up.shape[0]):
        gate = gate_up[t, :size].float()
        silu = (gate / (1 + torch.exp(-gate))).to(gate_up.dtype)
        out[t] = silu * gate_up[t, size:]
    return out


def torch_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def cuda_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference`."""
    module = compiled_for_cuda("activation")
    return torch_silu_and_mul(gate_up) if module is None else module.silu_and_mul(gate_up)
