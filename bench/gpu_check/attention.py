"""Attention's speed: decodes in bytes per second, prefills in operations per second, and others beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import kernels
from bench.gpu_check.attention_cases import FP8, new_caches, scrambled_tables
from bench.gpu_check.report import Bar, Row
from bench.gpu_check.setting import Setting, first_line

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
DECODES = [(batch, context) for context in (128, 1024, 2048, 8192, 32768) for batch in (1, 8, 32, 128, 256)]
FP8_DECODES = [(batch, context) for context in (2048, 8192, 32768) for batch in (1, 32, 128, 256)]
PREFILLS = [(1, 128), (1, 1024), (8, 1024), (1, 2048), (4, 2048), (1, 8192), (4, 8192), (1, 32768)]
MAX_DENSE_BYTES = 20 << 30
"""Others read keys and values that lie in one piece, which is made for them."""
DECODE_SHARE, PREFILL_SHARE, PREFILL_AIM = 0.85, 0.45, 0.6
_DECODE_FROM_BATCH, _DECODE_FROM_CONTEXT, _PREFILL_FROM = 32, 2048, 8192


def _try(setting: Setting, make: Callable[[], Callable[[], Any] | None]) -> float | str:
    """Seconds of what another library runs, or why it does not."""
    try:
        run = make()
        return "" if run is None else setting.seconds(run, 0.15)
    except Exception as error:
        return first_line(error)[:60]


def _dense(setting: Setting, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values [batch, num_kv_heads, context, head_size] in one piece."""
    num_bytes = 2 * batch * context * NUM_KV_HEADS * HEAD_SIZE * setting.dtype.itemsize
    if num_bytes > MAX_DENSE_BYTES:
        return None
    shape = (batch, NUM_KV_HEADS, context, HEAD_SIZE)
    return setting.randn(*shape), setting.randn(*shape)


def _flashinfer_decode(
    caches: tuple[torch.Tensor, torch.Tensor], tables: torch.Tensor, query: torch.Tensor, context: int
) -> Callable[[], Any] | None:
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    batch, width = tables.shape
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * width,
        tables.flatten(),
        torch.full((batch,), (context - 1) % BLOCK_SIZE + 1, dtype=torch.int32),
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_SIZE,
        BLOCK_SIZE,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    return lambda: wrapper.run(query, caches)


def decode(setting: Setting) -> Iterator[Row]:
    """A token per row at the same context, in caches of the type measured and of 8 bits; bytes are the caches'."""
    num_heads, num_kv_heads = (4, 2) if setting.is_dry else (NUM_HEADS, NUM_KV_HEADS)
    for dtype, cases in ((setting.dtype, DECODES), (FP8, FP8_DECODES)):
        cases = [(2, 9), (1, 5)] if setting.is_dry else cases
        most = max(batch * -(-context // BLOCK_SIZE) for batch, context in cases)
        caches = new_caches(setting, most + 1, BLOCK_SIZE, num_kv_heads, HEAD_SIZE, dtype)
        for batch, context in cases:
            row: Row = {"batch": batch, "context": context, "KV": str(dtype).removeprefix("torch.")}
            try:
                setting.require(5)
                row |= _decode_row(setting, caches, batch, context, num_heads)
            except Exception as error:
                row["note"] = setting.reason(error)
            yield row
        del caches


def _decode_row(
    setting: Setting, caches: tuple[torch.Tensor, torch.Tensor], batch: int, context: int, num_heads: int
) -> Row:
    block_size = caches[0].shape[1]
    tables = scrambled_tables([context] * batch, block_size, len(caches[0]), setting.device)
    query = setting.randn(batch, num_heads, HEAD_SIZE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=setting.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=setting.device)
    scale = HEAD_SIZE**-0.5
    out = torch.empty_like(query)

    def attend() -> None:
        kernels.paged_attention(query, *caches, starts, lengths, tables, scale, out=out)

    seconds = setting.seconds(attend)
    num_bytes = 2 * batch * context * caches[0][0, 0].numel() * caches[0].element_size()
    row: Row = {
        "us": seconds * 1e6,
        "GB/s": num_bytes / seconds / 1e9,
        "% of copy": 100 * num_bytes / seconds / setting.copy_rate,
    }
    if setting.is_dry or caches[0].dtype != setting.dtype:
        return row

    def sdpa() -> Callable[[], Any] | None:
        dense = _dense(setting, batch, context)
        if dense is None:
            return None
        one = query.unsqueeze(2)
        return lambda: F.scaled_dot_product_attention(one, *dense, scale=scale, enable_gqa=True)

    for name, make in (("SDPA", sdpa), ("FlashInfer", lambda: _flashinfer_decode(caches, tables, query, context))):
        found = _try(setting, make)
        row[f"{name} GB/s"] = num_bytes / found / 1e9 if isinstance(found, float) else found
    torch.cuda.empty_cache()
    return row


def prefill(setting: Setting) -> Iterator[Row]:
    """Whole prompts; operations are those below the diagonal."""
    for batch, length in [(1, 5), (2, 3)] if setting.is_dry else PREFILLS:
        row: Row = {"batch": batch, "tokens": length}
        try:
            setting.require(5)
            row |= _prefill_row(setting, batch, length)
        except Exception as error:
            row["note"] = setting.reason(error)
        yield row


def _prefill_row(setting: Setting, batch: int, length: int) -> Row:
    num_heads, num_kv_heads = (4, 2) if setting.is_dry else (NUM_HEADS, NUM_KV_HEADS)
    num_blocks = batch * -(-length // BLOCK_SIZE) + 1
    caches = new_caches(setting, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE)
    tables = scrambled_tables([length] * batch, BLOCK_SIZE, num_blocks, setting.device)
    query, scale = setting.randn(batch * length, num_heads, HEAD_SIZE), HEAD_SIZE**-0.5
    starts = torch.arange(batch + 1, dtype=torch.int32, device=setting.device) * length
    lengths = torch.full((batch,), length, dtype=torch.int32, device=setting.device)
    out = torch.empty_like(query)

    def attend() -> None:
        kernels.paged_attention(query, *caches, starts, lengths, tables, scale, out=out)

    seconds = setting.seconds(attend, 0.5)
    operations = 4 * batch * num_heads * HEAD_SIZE * length * (length + 1) / 2
    row: Row = {
        "us": seconds * 1e6,
        "TFLOP/s": operations / seconds / 1e12,
        "% of matmul": 100 * operations / seconds / setting.matmul_rate,
    }
    if setting.is_dry:
        return row
    views = query.view(batch, length, num_heads, HEAD_SIZE).transpose(1, 2).contiguous()

    def sdpa() -> Callable[[], Any] | None:
        dense = _dense(setting, batch, length)
        if dense is None:
            return None
        return lambda: F.scaled_dot_product_attention(views, *dense, is_causal=True, scale=scale, enable_gqa=True)

    def flash() -> Callable[[], Any] | None:
        if importlib.util.find_spec("flash_attn") is None:
            return None
        from flash_attn import flash_attn_func

        dense = _dense(setting, batch, length)
        if dense is None:
            return None
        key, value = (x.transpose(1, 2).contiguous() for x in dense)
        return lambda: flash_attn_func(views.transpose(1, 2), key, value, softmax_scale=scale, causal=True)

    for name, make in (("SDPA", sdpa), ("FlashAttention", flash)):
        found = _try(setting, make)
        row[f"{name} TFLOP/s"] = operations / found / 1e12 if isinstance(found, float) else found
    torch.cuda.empty_cache()
    return row


def flex(setting: Setting) -> Iterator[Row]:
    """torch's flex_attention on one prompt; compiling it takes most of the time."""
    if setting.is_dry:
        return
    length = 8192
    row: Row = {"batch": 1, "tokens": length}
    try:
        setting.require(45)
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=str(setting.device))
        compiled = torch.compile(flex_attention)
        query = setting.randn(1, NUM_HEADS, length, HEAD_SIZE)
        dense = _dense(setting, 1, length)
        assert dense is not None
        seconds = setting.seconds(lambda: compiled(query, *dense, block_mask=mask, enable_gqa=True))
        operations = 4 * NUM_HEADS * HEAD_SIZE * length * (length + 1) / 2
        row |= {"us": seconds * 1e6, "TFLOP/s": operations / seconds / 1e12}
    except Exception as error:
        row["note"] = setting.reason(error)
    yield row


def bars(decodes: list[Row], prefills: list[Row]) -> list[Bar]:
    """The worst of the cases that have a bar; caches in 8 bits have none."""
    found = []
    chosen = [
        row
        for row in decodes
        if row["batch"] >= _DECODE_FROM_BATCH
        and row["context"] >= _DECODE_FROM_CONTEXT
        and "% of copy" in row
        and not row["KV"].startswith("float8")
    ]
    worst = min(chosen, key=lambda row: row["% of copy"], default=None)
    what = f"decode attention at least {DECODE_SHARE:.0%} of the copy bandwidth from batch 32 x 2k up"
    text = "" if worst is None else f"{worst['% of copy']:.1f} % at {worst['batch']} x {worst['context']}"
    found.append(Bar(what, text, None if worst is None else worst["% of copy"] >= 100 * DECODE_SHARE))
    chosen = [row for row in prefills if row["tokens"] == _PREFILL_FROM and "% of matmul" in row]
    worst = min(chosen, key=lambda row: row["% of matmul"], default=None)
    text = "" if worst is None else f"{worst['% of matmul']:.1f} % at {worst['batch']} x {worst['tokens']}"
    for share, kind in ((PREFILL_SHARE, "bar"), (PREFILL_AIM, "aim")):
        what = f"prefill at least {share:.0%} of the matrix rate at 8k ({kind})"
        found.append(Bar(what, text, None if worst is None else worst["% of matmul"] >= 100 * share))
    return found
