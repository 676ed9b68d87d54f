"""Every operation of the table against its reference, in three types."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_cases import CALLS, Call, paged, randn

import kernels
from kernels.attention import torch_paged_attention
from kernels.matrix import column_major

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Largest root mean square error, as a part of the reference's root mean square.
MAX_ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def tensors(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def outcome(function: Any, call: Call) -> list[torch.Tensor]:
    """What a call returns and what it changed, on a copy of its arguments."""
    args, kwargs = copy.deepcopy((call.args, call.kwargs))
    returned = tensors(function(*args, **kwargs))
    unchanged = [i for i in range(len(args)) if i not in call.changed]
    for i in unchanged:
        if isinstance(args[i], torch.Tensor):
            assert torch.equal(args[i].nan_to_num(7.0), call.args[i].nan_to_num(7.0)), f"argument {i} was changed"
    return returned + [args[i] for i in call.changed]


def error_ratio(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp(min=1e-12))


def test_every_operation_has_cases() -> None:
    assert set(CALLS) == set(kernels.OPERATIONS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_parity(name: str, dtype: torch.dtype) -> None:
    operation = kernels.OPERATIONS[name]
    for number, call in enumerate(CALLS[name](torch.Generator().manual_seed(1), dtype)):
        expected = outcome(operation.reference, call)
        got = outcome(operation.implementation("cpu"), call)
        assert len(got) == len(expected) > 0
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if b.numel() == 0:
                continue
            assert torch.equal(a.isnan(), b.isnan()), f"call {number}: NaN in other places"
            assert error_ratio(a.nan_to_num(), b.nan_to_num()) <= MAX_ERROR[dtype], f"call {number}"


def test_attention_never_gives_nan() -> None:
    for call in CALLS["paged_attention"](torch.Generator().manual_seed(2), torch.float32):
        (result,) = outcome(torch_paged_attention, call)
        assert not result.isnan().any()


def test_attention_row_does_not_depend_on_its_batch() -> None:
    """The same result alone and in a mixed batch, to float32 rounding.

    Case: vllm#5898
    """
    generator = torch.Generator().manual_seed(3)
    rows = [(1, 40), (1, 41), (9, 30), (1, 700), (1, 3), (600, 600)]
    kv = paged(generator, rows, block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32)
    query = randn(generator, int(kv.query_start_loc[-1]), 9, 64, dtype=torch.float32)
    caches = (kv.key_cache, kv.value_cache)
    together = torch_paged_attention(query, *caches, kv.query_start_loc, kv.seq_lens, kv.block_tables, 0.125)
    for row in range(len(rows)):
        tokens = slice(int(kv.query_start_loc[row]), int(kv.query_start_loc[row + 1]))
        alone = torch_paged_attention(
            query[tokens],
            *caches,
            torch.tensor([0, rows[row][0]], dtype=torch.int32),
            kv.seq_lens[row : row + 1],
            kv.block_tables[row : row + 1],
            0.125,
        )
        torch.testing.assert_close(alone, together[tokens], rtol=1e-6, atol=1e-6)


def test_attention_is_the_same_in_chunks() -> None:
    """A prompt in one chunk, in chunks, and token by token; longer than a query tile."""
    generator = torch.Generator().manual_seed(4)
    kv = paged(generator, [(600, 600)], block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    query = randn(generator, 600, 4, 16, dtype=torch.float32)
    for window in (None, 100):

        def run(start: int, end: int, window: int | None = window) -> torch.Tensor:
            return torch_paged_attention(
                query[start:end],
                kv.key_cache,
                kv.value_cache,
                torch.tensor([0, end - start], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                kv.block_tables,
                0.25,
                sliding_window=window,
            )

        whole = run(0, 600)
        for size in (1, 37, 256, 300):
            chunks = torch.cat([run(start, min(start + size, 600)) for start in range(0, 600, size)])
            torch.testing.assert_close(chunks, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 576), (63, 200)])
def test_linear_rows_do_not_depend_on_their_number(in_features: int, out_features: int) -> None:
    """The same bits for one row and for many, in float32, with plain weights that lie column by column and one thread.

    Case: vllm#5898
    """
    generator = torch.Generator().manual_seed(5)
    weight = column_major(out_features, in_features, dtype=torch.float32, device=torch.device("cpu"))
    weight.copy_(randn(generator, out_features, in_features, dtype=torch.float32))
    x = randn(generator, 300, in_features, dtype=torch.float32)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        together = kernels.linear(x, weight)
        for count in (1, 2, 3, 7, 16, 33, 130):
            assert torch.equal(kernels.linear(x[:count].contiguous(), weight), together[:count]), f"{count} rows"
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(("choice", "expected"), [("reference", "reference"), ("auto", "cpu_rms_norm")])
def test_environment_switches_to_references(choice: str, expected: str) -> None:
    code = "import kernels; print(kernels.rms_norm.implementation('cpu').__name__)"
    env = {**os.environ, "PAGEWIRE_KERNELS": choice}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == expected, result.stderr


def test_environment_refuses_an_unknown_choice() -> None:
    env = {**os.environ, "PAGEWIRE_KERNELS": "fast"}
    result = subprocess.run(
        [sys.executable, "-c", "import kernels"], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0 and "PAGEWIRE_KERNELS is 'fast'" in result.stderr
