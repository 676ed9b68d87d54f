"""The last step of split paged attention in Triton: a program joins the segments of one head of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import FLOATS, Variant

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_rows"])
def _reduce(  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse, query_start_loc, num_rows, out_token, out_head,
    VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """partial_lse counts in powers of two; a segment without keys has -inf there, and its partial is not read."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if (token < tl.load(query_start_loc)) | (token >= tl.load(query_start_loc + num_rows)):
        return  # no row's token: nobody wrote its partial results
    segments, dims = tl.arange(0, SEGMENTS), tl.arange(0, VALUE_PADDED)
    at = (token * tl.num_programs(1) + head) * SEGMENTS + segments
    log_totals = tl.load(partial_lse + at)
    is_any = log_totals > float("-inf")
    highest = tl.max(log_totals, 0)
    weights = tl.exp2(log_totals - tl.where(highest > float("-inf"), highest, 0.0))
    is_read = is_any[:, None] & (dims < VALUE_SIZE)[None, :]
    results = tl.load(partial + at[:, None] * VALUE_SIZE + dims[None, :], is_read, 0.0)
    total = tl.sum(weights, 0)
    whole = tl.where(total > 0.0, total, 1.0)
    result = tl.sum(results * weights[:, None], 0) / whole
    tl.store(out + token * out_token + head * out_head + dims, result.to(out.dtype.element_ty), dims < VALUE_SIZE)
    if lse is not None:
        tl.store(lse + token * tl.num_programs(1) + head, (highest + tl.log2(whole)) * LN_2)


def reduce_segments(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fills out and lse of every token that a row has.

    partial [num_tokens, num_heads, segments, value_size] float32, each over its own total; partial_lse without the
    last dimension, logarithms to the base 2 of those totals.
    """
    num_tokens, num_heads, segments, value_size = partial.shape
    value_padded = int(triton.next_power_of_2(value_size))
    _reduce[(num_tokens, num_heads)](
        out, lse, partial, partial_lse, query_start_loc, num_rows, *out.stride()[:2],
        VALUE_SIZE=value_size, VALUE_PADDED=value_padded, SEGMENTS=segments,
        num_warps=num_warps(segments, value_padded),
    )  # fmt: skip


def num_warps(segments: int, value_padded: int) -> int:
    """So that a thread holds at most 64 partial numbers."""
    return min(8, max(2, segments * value_padded // 2048))


def variants() -> list[Variant]:
    """Few and many segments; without log-sum-exps in every type."""
    wanted = [("bf16", *sizes, True) for sizes in ((64, 4), (80, 16), (128, 64), (256, 64))]
    # What bench/gpu_check launches.
    wanted += [(kind, *sizes, False) for kind in FLOATS for sizes in ((96, 2), (128, 4), (128, 64), (256, 32))]
    wanted += [("bf16", 128, segments, False) for segments in (8, 16)]
    return [_variant(*one) for one in wanted]


def _variant(kind: str, size: int, segments: int, has_lse: bool) -> Variant:
    types = {"out": f"*{kind}", "partial": "*fp32", "partial_lse": "*fp32", "query_start_loc": "*i32"}
    types |= {"num_rows": "i32", "out_token": "i32", "out_head": "i32"} | ({"lse": "*fp32"} if has_lse else {})
    padded = int(triton.next_power_of_2(size))
    constants = {"VALUE_SIZE": size, "VALUE_PADDED": padded, "SEGMENTS": segments} | ({} if has_lse else {"lse": None})
    name = f"paged_attention reduce {kind} {size} of {segments}{' lse' if has_lse else ''}"
    aligned = frozenset({"out_token", "out_head"})
    return Variant(name, _reduce, types, constants, num_warps=num_warps(segments, padded), aligned=aligned)
