"""The operations between the products, in bytes per second: norm, rotary and KV write, gate, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import kernels
from bench.gpu_check.attention_cases import new_caches
from bench.gpu_check.report import Row
from bench.gpu_check.setting import Setting
from kernels.sampling import Draws

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
VOCAB_SIZE = 128256
TOKENS, SAMPLED = (1, 32, 128, 2048, 8192), (1, 32, 128, 256)

Timed = tuple[Callable[[], Any], int]
"""A call, and the bytes that it must read and write."""


def _norm(setting: Setting, num_tokens: int) -> Timed:
    size = 32 if setting.is_dry else HIDDEN
    x, residual, weight = setting.randn(num_tokens, size), setting.randn(num_tokens, size), setting.randn(size)
    return lambda: kernels.rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes


def _gate(setting: Setting, num_tokens: int) -> Timed:
    gate_up = setting.randn(num_tokens, 64 if setting.is_dry else 2 * INTERMEDIATE)
    return lambda: kernels.silu_and_mul(gate_up), gate_up.nbytes * 3 // 2


def _rotary(setting: Setting, num_tokens: int) -> Timed:
    num_heads, num_kv_heads = (2, 1) if setting.is_dry else (NUM_HEADS, NUM_KV_HEADS)
    caches = new_caches(setting, -(-num_tokens // BLOCK_SIZE) + 1, BLOCK_SIZE, num_kv_heads, HEAD_SIZE)
    qkv = setting.randn(num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_SIZE)
    angles = torch.rand(max(num_tokens, 2), HEAD_SIZE // 2, device=setting.device)
    tables = (angles.cos(), angles.sin())
    positions = torch.arange(num_tokens, device=setting.device)
    slots = positions + BLOCK_SIZE
    token_bytes = HEAD_SIZE * setting.dtype.itemsize * (2 * num_heads + 4 * num_kv_heads)
    run = lambda: kernels.rotate_and_write_kv(qkv, positions, tables, *caches, slots, HEAD_SIZE)  # noqa: E731
    return run, num_tokens * token_bytes


def _logits(setting: Setting, rows: int) -> torch.Tensor:
    return setting.randn(rows, 200 if setting.is_dry else VOCAB_SIZE, dtype=torch.float32) * 3


def _argmax(setting: Setting, rows: int) -> Timed:
    logits = _logits(setting, rows)
    return lambda: kernels.argmax(logits), logits.nbytes


def _sampler(top_k: int, top_p: float) -> Callable[[Setting, int], Timed]:
    def make(setting: Setting, rows: int) -> Timed:
        logits, device = _logits(setting, rows), setting.device

        def full(value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        draws = Draws(
            temperature=full(0.8, torch.float32),
            top_k=full(top_k),
            top_p=full(top_p, torch.float64),
            min_p=full(0.0, torch.float64),
            seeds=torch.arange(rows, device=device),
            positions=full(100),
            child_indices=full(0),
        )
        return lambda: kernels.sample(logits, draws), logits.nbytes

    return make


MAKERS: dict[str, tuple[Callable[[Setting, int], Timed], tuple[int, ...]]] = {
    "rms_norm with residual": (_norm, TOKENS),
    "silu_and_mul": (_gate, TOKENS),
    "rotate_and_write_kv": (_rotary, TOKENS),
    "argmax": (_argmax, SAMPLED),
    "sample by temperature": (_sampler(0, 1.0), SAMPLED),
    "sample with top-k 50, top-p 0.9": (_sampler(50, 0.9), SAMPLED),
    "sample with top-p 0.95": (_sampler(0, 0.95), SAMPLED),
}


def run(setting: Setting) -> Iterator[Row]:
    """Bytes are those that a single pass reads and writes, so a second pass shows as half the rate."""
    for name, (make, counts) in MAKERS.items():
        for count in (3,) if setting.is_dry else counts:
            row: Row = {"operation": name, "rows": count}
            try:
                setting.require(3)
                call, num_bytes = make(setting, count)
                seconds = setting.seconds(call, 0.15)
                row |= {
                    "us": seconds * 1e6,
                    "GB/s": num_bytes / seconds / 1e9,
                    "% of copy": 100 * num_bytes / seconds / setting.copy_rate,
                }
            except Exception as error:
                row["note"] = setting.reason(error)
            yield row
