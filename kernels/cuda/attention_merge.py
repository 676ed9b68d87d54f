"""merge_attention in Triton: a program joins some (token, head) pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import FLOATS, Variant

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
BLOCK = 2048
"""Numbers of a program."""


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, out_a, lse_a, out_b, lse_b, num_pairs,
    VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Everything lies in one run."""
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pairs < num_pairs
    dims = tl.arange(0, VALUE_PADDED)[None, :]
    places = pairs[:, None] * VALUE_SIZE + dims
    log_a = tl.load(lse_a + pairs, is_pair, float("-inf"))
    log_b = tl.load(lse_b + pairs, is_pair, float("-inf"))
    highest = tl.maximum(log_a, log_b)
    base = tl.where(highest > float("-inf"), highest, 0.0)
    weight_a = tl.exp2((log_a - base) * LOG2_E)
    weight_b = tl.exp2((log_b - base) * LOG2_E)
    total = weight_a + weight_b
    whole = tl.where(total > 0.0, total, 1.0)
    # What has no keys may hold anything: it is not read.
    a = tl.load(out_a + places, (log_a > float("-inf"))[:, None] & (dims < VALUE_SIZE), 0.0).to(tl.float32)
    b = tl.load(out_b + places, (log_b > float("-inf"))[:, None] & (dims < VALUE_SIZE), 0.0).to(tl.float32)
    result = a * (weight_a / whole)[:, None] + b * (weight_b / whole)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), is_pair[:, None] & (dims < VALUE_SIZE))
    tl.store(lse + pairs, highest + tl.log2(whole) * LN_2, is_pair)


def _constants(value_size: int) -> dict[str, int]:
    value_padded = int(triton.next_power_of_2(value_size))
    return {"VALUE_SIZE": value_size, "VALUE_PADDED": value_padded, "PAIRS": max(1, BLOCK // value_padded)}


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.attention_merge.reference`."""
    out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if out.numel():
        constants = _constants(out.shape[2])
        grid = (triton.cdiv(lse.numel(), constants["PAIRS"]),)
        _merge[grid](out, lse, out_a, lse_a, out_b, lse_b, lse.numel(), **constants)
    return out, lse


def variants() -> list[Variant]:
    """One per type, and one with a padded head."""
    logs = dict.fromkeys(("lse", "lse_a", "lse_b"), "*fp32")
    return [
        Variant(
            f"merge_attention {name} {size}",
            _merge,
            dict.fromkeys(("out", "out_a", "out_b"), f"*{name}") | logs | {"num_pairs": "i32"},
            _constants(size),
        )
        for name, size in [*((name, 128) for name in FLOATS), ("bf16", 96)]
    ]
