"""Ragged batches over scrambled blocks, and their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu_check.setting import Setting
from kernels.kv_layout import block_size_of, cache_shapes

FP8 = torch.float8_e4m3fn
SCALES = ("no scales", "a scale per tensor", "a scale per head")
"""Of caches in 8 bits."""


@dataclass(frozen=True)
class Case:
    """Rows of (query tokens, all tokens), heads, and what attention is asked for."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"
        return f"{len(self.rows)} rows {heads} block {self.block_size} {' '.join(self.options)}".rstrip()


_MIX = ((512, 512), (1, 2000), (130, 3000), (1, 1), (5, 700), (1, 4097), (0, 9))
_DECODES = tuple((1, 1 + 211 * i) for i in range(24))
CASES = [
    Case(_MIX),
    Case(_DECODES),
    Case(((1, 9000),)),
    Case(_MIX, head_size=64, block_size=32, options=("sliding_window", "sinks")),
    Case(_MIX, 16, 16, 80, options=("alibi_slopes",)),
    Case(_MIX, 12, 2, 96, options=("softcap",)),
    Case(_DECODES, 8, 1, 256, options=("softcap", "sliding_window")),
    Case(((2048, 2048), (300, 1500)), options=("sliding_window",)),
]
DRY_CASES = [Case(((5, 9), (1, 7), (2, 2)), 4, 2, 16, 4), Case(((1, 6),), 2, 1, 16, 4, ("sliding_window", "sinks"))]


@dataclass
class PagedCase:
    """A case's tensors on the device."""

    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    out: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)


def scrambled_tables(lengths: list[int], block_size: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Block tables of rows that own as many of the blocks 1 to num_blocks - 1 as they need, in no order."""
    widths = [-(-length // block_size) for length in lengths]
    order = torch.randperm(num_blocks - 1)[: sum(widths)].int() + 1
    tables = torch.zeros(len(lengths), max([*widths, 1]), dtype=torch.int32)
    start = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[start : start + width]
        start += width
    return tables.to(device)


def random_scales(setting: Setting, kind: str, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """A kind of SCALES, as operations take them."""
    count = {"no scales": 0, "a scale per tensor": 1, "a scale per head": num_kv_heads}[kind]
    names = ("key_scale", "value_scale") if count else ()
    return {name: torch.rand(count, device=setting.device) + 0.5 for name in names}


def paged_case(
    setting: Setting, case: Case, dtype: torch.dtype, cache_dtype: torch.dtype, scales: str = SCALES[0]
) -> PagedCase:
    """Fresh random numbers; NaN in the output and in the null block, which nothing may read."""
    lengths = [length for _, length in case.rows]
    num_blocks = sum(-(-length // case.block_size) for length in lengths) + 1
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    keys, values = (setting.randn(*shape, dtype=torch.float32) for _ in range(2))
    for cache in (keys, values):
        cache[0] = torch.nan
    num_tokens = sum(count for count, _ in case.rows)
    options: dict[str, Any] = dict(random_scales(setting, scales, case.num_kv_heads))
    for name in case.options:
        number = {"sliding_window": 300, "softcap": 20.0}.get(name)
        options[name] = setting.randn(case.num_heads, dtype=torch.float32) if number is None else number
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].abs() / 50
    counts = torch.tensor([0, *(count for count, _ in case.rows)])
    return PagedCase(
        query=setting.randn(num_tokens, case.num_heads, case.head_size, dtype=torch.float32).to(dtype),
        caches=(keys.to(cache_dtype), values.to(cache_dtype)),
        query_start_loc=counts.cumsum(0).int().to(setting.device),
        seq_lens=torch.tensor(lengths).int().to(setting.device),
        block_tables=scrambled_tables(lengths, case.block_size, num_blocks, setting.device),
        scale=case.head_size**-0.5,
        out=torch.full((num_tokens, case.num_heads, case.head_size), torch.nan, dtype=dtype, device=setting.device),
        options=options,
    )


def _per_head(scale: torch.Tensor | None) -> torch.Tensor | float:
    return 1.0 if scale is None else scale.double()[:, None]


def dense_attention(kv: PagedCase) -> torch.Tensor:
    """The same by products of whole rows in float64: [num_tokens, num_heads, head_size]."""
    starts, out = kv.query_start_loc.tolist(), torch.zeros_like(kv.out, dtype=torch.float64)
    groups = kv.query.shape[1] // kv.caches[0].shape[2]
    block_size = block_size_of(kv.caches[0])
    for row, length in enumerate(kv.seq_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        if first == end:
            continue
        blocks = kv.block_tables[row, : -(-length // block_size)].long()
        # 8-bit caches can be indexed as bytes only.
        key, value = (
            cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.dtype == FP8 else cache[blocks]
            for cache in kv.caches
        )
        key, value = (
            (x.flatten(0, 1)[:length].double() * _per_head(kv.options.get(name))).repeat_interleave(groups, dim=1)
            for x, name in ((key, "key_scale"), (value, "value_scale"))
        )
        scores = torch.einsum("qhd,khd->hqk", kv.query[first:end].double(), key) * kv.scale
        if (softcap := kv.options.get("softcap")) is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(length, device=scores.device)
        distance = (length - (end - first) + torch.arange(end - first, device=scores.device))[:, None] - places[None]
        if (slopes := kv.options.get("alibi_slopes")) is not None:
            scores = scores - slopes.double()[:, None, None] * distance
        is_hidden = distance < 0
        if (window := kv.options.get("sliding_window")) is not None:
            is_hidden = is_hidden | (distance >= window)
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if (sinks := kv.options.get("sinks")) is not None:
            column = sinks.double()[:, None, None].expand(-1, end - first, 1)
            scores = torch.cat([scores, column], dim=2)
            value = torch.cat([value, torch.zeros_like(value[:1])])
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)
    return out


def new_caches(
    setting: Setting,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random caches, of the type that is measured if none is given; filled in parts, as numbers pass through others."""
    dtype = dtype or setting.dtype
    shapes = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=setting.device)
    caches = [torch.empty(shape, dtype=dtype, device=setting.device) for shape in shapes]
    for cache in caches:
        for part in cache.split(1 << 14):
            part.copy_(setting.randn(*part.shape))
    return caches[0], caches[1]
