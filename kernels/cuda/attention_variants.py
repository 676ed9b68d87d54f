"""What paged attention is compiled for ahead of time: head sizes, types, tiles, and its options in sensible sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton.language as tl

from kernels.cuda.attention import CONVERTS_E4M3, padded, paged_attention_kernel
from kernels.cuda.tiles import Device, Shape, Tiles, tiles
from kernels.cuda.variant import CAPABILITIES, Variant

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}
_COMPUTE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
_POINTERS = ("out", "query", "key_cache", "value_cache")
_STRIDES = (
    "out_token", "out_head", "query_token", "query_head",
    "key_block", "key_slot", "key_head", "value_block", "value_slot", "value_head",
)  # fmt: skip
_OPTIONS: Mapping[str, str] = {
    "lse": "*fp32",
    "sinks": "*fp32",
    "alibi_slopes": "*fp32",
    "key_scale": "*fp32",
    "value_scale": "*fp32",
    "softcap": "fp32",
    "window": "i32",
}
"""What may be None."""
_SMS = {80: 108, 90: 132, 100: 148}
_MEASURED = (90,)
_SCALES = ("key_scale", "value_scale")
MAX_KEYS = 16384


@dataclass(frozen=True)
class _Batch:
    """A batch that a variant stands for."""

    name: str
    num_tokens: int
    num_rows: int
    groups: int = 4
    num_kv_heads: int = 8


_DECODE = _Batch("decode", 256, 256)
_SPLIT = _Batch("split decode", 8, 8)
_VERIFY = _Batch("verification", 1024, 256, groups=8)
_MIXED = _Batch("mixed", 301, 64)
_PREFILL = _Batch("prefill", 8192, 4)
_SPLIT_PREFILL = _Batch("split prefill", 256, 1)
_CASES = (
    (128, 16, _SPLIT, ()),
    (128, 16, _PREFILL, ("window",)),
    (64, 32, _Batch("ragged", 650, 7), ("window", "sinks")),
    (80, 16, _Batch("ragged", 650, 7, groups=1, num_kv_heads=16), ("alibi_slopes",)),
    (96, 16, _Batch("ragged", 650, 7, groups=6, num_kv_heads=2), ("softcap",)),
    (256, 16, _Batch("split decode", 24, 24, groups=8, num_kv_heads=1), ("window", "softcap")),
)
"""Head size, block size, batch and options of what is compared with float64 on a GPU: bench/gpu_check."""


def _chosen(query: str, cache: str, size: int, batch: _Batch, capability: int) -> Tiles:
    shape = Shape(size, size, batch.groups, _BYTES[query], _BYTES[cache])
    device = Device(capability, _SMS[capability])
    return tiles(shape, device, batch.num_tokens, batch.num_rows, batch.num_kv_heads, MAX_KEYS)


def _variants(
    query: str,
    cache: str,
    size: int,
    batch: _Batch,
    options: tuple[str, ...] = (),
    block_size: int = 16,
    capabilities: tuple[int, ...] = CAPABILITIES,
) -> list[Variant]:
    """One per set of tiles that the capabilities' GPUs take."""
    by_tiles: dict[tuple[Tiles, str], list[int]] = {}
    for capability in capabilities:
        bits = "u8" if cache == "fp8e4nv" and capability < CONVERTS_E4M3 else cache
        by_tiles.setdefault((_chosen(query, cache, size, batch, capability), bits), []).append(capability)
    kind = query if cache == query else f"{query} on {cache}"
    name = " ".join(["paged_attention", kind, str(size), batch.name, *options])
    name += f" groups of {batch.groups}" if batch.groups != 4 and batch is not _VERIFY else ""
    name += f" blocks of {block_size}" if block_size != 16 else ""
    return [
        _variant(
            name if len(by_tiles) == 1 else f"{name} sm_{found[0]}",
            (query, bits),
            size,
            cut,
            batch.groups,
            options,
            block_size,
            tuple(found),
        )
        for (cut, bits), found in by_tiles.items()
    ]


def _variant(
    name: str,
    kinds: tuple[str, str],
    size: int,
    cut: Tiles,
    groups: int,
    options: tuple[str, ...],
    block_size: int,
    capabilities: tuple[int, ...],
) -> Variant:
    query, cache = kinds
    types = {name: f"*{cache if 'cache' in name else query}" for name in _POINTERS} | dict.fromkeys(_STRIDES, "i32")
    types |= {"partial": "*fp32", "partial_lse": "*fp32", "scale": "fp32", **_OPTIONS}
    types |= dict.fromkeys(("query_start_loc", "seq_lens", "block_tables"), "*i32")
    types |= dict.fromkeys(("num_rows", "num_heads", "table_row", "key_scale_head", "value_scale_head"), "i32")
    absent = [x for x in _OPTIONS if x not in options] + ([] if cut.segments > 1 else ["partial", "partial_lse"])
    constants = dict.fromkeys(absent) | {
        "HEAD_SIZE": size, "VALUE_SIZE": size, "HEAD_PADDED": padded(size), "VALUE_PADDED": padded(size),
        "GROUPS": groups, "BLOCK_SIZE": block_size, "ROWS": cut.rows, "QUERIES": cut.queries, "KEYS": cut.keys,
        "SEGMENTS": cut.segments, "COMPUTE": _COMPUTE[query],
    }  # fmt: skip
    return Variant(
        name, paged_attention_kernel, types, constants, cut.num_warps, cut.num_stages, frozenset(_STRIDES), capabilities
    )


def variants() -> list[Variant]:
    """The types and sizes that models have, and each option once in a decode and once in a prefill.

    What matters most is compiled for every kind of GPU, the rest for the one that is measured.
    """
    found: list[Variant] = []
    for batch in (_DECODE, _SPLIT, _PREFILL):
        for size in (64, 128):
            found += _variants("bf16", "bf16", size, batch)
    for batch in (_VERIFY, _MIXED, _SPLIT_PREFILL):
        found += _variants("bf16", "bf16", 128, batch, capabilities=_MEASURED if batch is not _MIXED else CAPABILITIES)
    for batch in (_DECODE, _PREFILL):
        found += _variants("bf16", "bf16", 80, batch, capabilities=_MEASURED)
        found += _variants("bf16", "bf16", 96, batch, capabilities=_MEASURED)
        found += _variants("bf16", "bf16", 256, batch)
        found += _variants("fp16", "fp16", 128, batch, capabilities=_MEASURED)
        for size in (64, 128):
            found += _variants("fp32", "fp32", size, batch, capabilities=_MEASURED)
        found += _variants("bf16", "fp8e4nv", 64, batch, _SCALES, capabilities=_MEASURED)
        found += _variants("bf16", "fp8e4nv", 128, batch, _SCALES)
        found += _variants("fp16", "fp8e4nv", 128, batch, _SCALES, capabilities=_MEASURED)
    for batch in (_SPLIT, _PREFILL):
        found += _variants("bf16", "bf16", 128, batch, ("window",))
        found += _variants("bf16", "bf16", 64, batch, ("window", "sinks"), capabilities=_MEASURED)
        found += _variants("bf16", "bf16", 256, batch, ("window", "softcap"), capabilities=_MEASURED)
        found += _variants("bf16", "bf16", 128, batch, ("lse",), capabilities=_MEASURED)
        found += _variants("bf16", "bf16", 64, batch, ("alibi_slopes",), capabilities=_MEASURED)
    found += _variants("bf16", "bf16", 128, _DECODE, block_size=5, capabilities=_MEASURED)
    return found + _variants_of_cases({variant.name for variant in found})


def _variants_of_cases(known: set[str]) -> list[Variant]:
    """In every type that such a GPU multiplies, and over caches in 8 bits, with scales and without."""
    found: list[Variant] = []
    for query in _COMPUTE:
        for cache in (query, "fp8e4nv") if query != "fp32" else (query,):
            scales = _SCALES if cache != query else ()
            for size, block_size, batch, options in _CASES:
                found += _variants(query, cache, size, batch, (*options, *scales), block_size, _MEASURED)
            for batch in (_DECODE, _SPLIT, _PREFILL) if scales else ():
                found += _variants(query, cache, 128, batch, capabilities=_MEASURED)
    return [variant for variant in found if variant.name not in known]
