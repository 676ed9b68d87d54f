"""merge_attention: joins attention over two sets of keys into attention over both."""

from __future__ import annotations

import math

import torch

from kernels.compiled import compiled_for_cuda


def reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the same queries to the keys of both parts: to a shared prefix and to what follows it, say.

    out_a and out_b [num_tokens, num_heads, value_size] of one type, each over its own total; lse_a and lse_b
    [num_tokens, num_heads] float32, natural logarithms of those totals (`paged_attention` gives both). A part whose
    lse is -inf counts for nothing, whatever its out holds; two such give zeros and -inf. A sink must be in one part
    only. Sums are float32. Returns out and lse of the whole.
    Source: "FlashInfer", Ye et al., 2025, section 2.2.
    """
    out, lse = torch.zeros_like(out_a), torch.full_like(lse_a, -math.inf)
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            a, b = float(lse_a[token, head]), float(lse_b[token, head])
            highest = max(a, b)
            if highest == -math.inf:
                continue
            total = math.exp(a - highest) + math.exp(b - highest)
            result = torch.zeros(out.shape[2])
            for part, log in ((out_a, a), (out_b, b)):
                if log > -math.inf:
                    result += math.exp(log - highest) / total * part[token, head].float()
            out[token, head] = result.to(out.dtype)
            lse[token, head] = highest + math.log(total)
    return out, lse


def torch_merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.clamp(min=torch.finfo(torch.float32).min)
    result = torch.zeros(out_a.shape, dtype=torch.float32, device=out_a.device)
    for part, log in ((out_a, lse_a), (out_b, lse_b)):
        weighted = part.float() * (log - base).exp().unsqueeze(-1)
        result += weighted.masked_fill((log == -torch.inf).unsqueeze(-1), 0)
    return result.to(out_a.dtype), lse


def cuda_merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    module = compiled_for_cuda("attention_merge")
    merge = torch_merge_attention if module is None else module.merge_attention
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    return out, lse
