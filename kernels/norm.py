"""rms_norm: root mean square normalization, with the residual addition before it (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch

from kernels.compiled import compiled, compiled_for_cuda


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual and normalizes the sum over its last dimension.

    x and residual [..., size], weight [size]. Returns (normalized, sum), both in x's type. With a residual both are
    overwritten: residual becomes the sum, x the normalized; without one the sum is x itself. The statistics are
    float32; the normalized value is rounded to x's type before the weight is applied.
    """
    total = x if residual is None else residual.add_(x)
    rows = total.reshape(-1, total.shape[-1])
    out = torch.empty_like(rows)
    for i, row in enumerate(rows):
        values = row.float()
        mean_square = (values * values).sum() / values.numel()
        out[i] = (values / torch.sqrt(mean_square + eps)).to(x.dtype) * weight
    out = out.reshape(total.shape)
    return out if residual is None else x.copy_(out), total


def torch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    total = x if residual is None else residual.add_(x)
    values = total.float()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True).add_(eps))
    out = (values * inverse).to(x.dtype).mul_(weight)
    return out if residual is None else x.copy_(out), total


def cpu_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    module = compiled("norm")
    if module is None or not module.can_normalize(x, weight, residual):
        return torch_rms_norm(x, weight, eps, residual)
    normalized: tuple[torch.Tensor, torch.Tensor] = module.rms_norm(x, weight, eps, residual)
    return normalized


def cuda_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    module = compiled_for_cuda("norm")
    if module is None or not module.can_normalize(x, weight, residual):
        return torch_rms_norm(x, weight, eps, residual)
    normalized: tuple[torch.Tensor, torch.Tensor] = module.rms_norm(x, weight, eps, residual)
    return normalized
