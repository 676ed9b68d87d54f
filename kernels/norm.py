"""rms_norm: root mean square normalization, with the residual addition before it (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual to x and normalizes the sum over its last dimension.

    x and residual [..., size], weight [size]. Returns (normalized, sum), both in x's type; without a residual the sum
    is x itself. The statistics are float32; the normalized value is rounded to x's type before the weight is applied.
    """
    total = x if residual is None else x + residual
    rows = total.reshape(-1, total.shape[-1])
    out = torch.empty_like(rows)
    for i, row in enumerate(rows):
        values = row.float()
        mean_square = (values * values).sum() / values.numel()
        out[i] = (values / torch.sqrt(mean_square + eps)).to(x.dtype) * weight
    return out.reshape(total.shape), total


def torch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    total = x if residual is None else x + residual
    values = total.float()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True).add_(eps))
    return (values * inverse).to(x.dtype).mul_(weight), total
