"""Products of packed weights in every instruction set that this machine has: parity, sameness, odd shapes, packing."""

from __future__ import annotations

import logging

import pytest
import torch
from kernel_cases import randn

import kernels
from kernels import matrix
from kernels.cpu import features, jit
from kernels.float_weight import FloatWeight
from kernels.matrix import reference, reference_gated

USABLE_ISAS = features.ISAS[features.ISAS.index(features.isa()) :]
PATHS = [("float32", "generic"), ("float16", "generic"), *(("bfloat16", isa) for isa in USABLE_ISAS)]
# Largest root mean square error, as a part of the reference's root mean square.
MAX_ERROR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
CPU = torch.device("cpu")


@pytest.fixture(params=PATHS, ids="-".join)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A type, with the instruction set that its weights take."""
    name, isa = request.param
    monkeypatch.setattr(features, "isa", lambda: isa)
    return getattr(torch, name)


def packed(
    generator: torch.Generator, sizes: list[int], in_features: int, dtype: torch.dtype, is_gated: bool = False
) -> FloatWeight:
    weight = FloatWeight(sizes, in_features, dtype, is_gated)
    weight.fill(randn(generator, sum(sizes), in_features, dtype=dtype) / in_features**0.5)
    return weight


def error_ratio(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


SHAPES = [
    (1, 1, [1]),
    (3, 33, [7]),
    (5, 576, [96, 32, 32]),
    (17, 100, [10, 5, 40]),
    (70, 64, [130]),
    (300, 40, [24, 9]),
]


@pytest.mark.parametrize(("num_rows", "in_features", "sizes"), SHAPES)
def test_products_agree_with_the_reference(
    dtype: torch.dtype, num_rows: int, in_features: int, sizes: list[int]
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = packed(generator, sizes, in_features, dtype)
    x, bias = randn(generator, num_rows, in_features, dtype=dtype), randn(generator, sum(sizes), dtype=dtype)
    for some_bias in (None, bias):
        got, expected = kernels.linear(x, weight, some_bias), reference(x, weight, some_bias)
        assert got.dtype == dtype and got.shape == expected.shape
        assert error_ratio(got, expected) <= MAX_ERROR[dtype]
    exact = x.float() @ weight.unpacked().float().T
    logits = kernels.logits(x, weight)
    assert logits.dtype == torch.float32 and error_ratio(logits, exact) <= 1e-6


@pytest.mark.parametrize(("num_rows", "in_features", "size"), [(1, 64, 16), (4, 33, 5), (19, 96, 41), (40, 32, 100)])
def test_gated_products_agree_with_the_reference(
    dtype: torch.dtype, num_rows: int, in_features: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    weight = packed(generator, [size, size], in_features, dtype, is_gated=True)
    x, bias = randn(generator, num_rows, in_features, dtype=dtype), randn(generator, 2 * size, dtype=dtype)
    for some_bias in (None, bias):
        got, expected = kernels.gated_linear(x * 3, weight, some_bias), reference_gated(x * 3, weight, some_bias)
        assert got.dtype == dtype and got.shape == (num_rows, size)
        assert error_ratio(got, expected) <= 2 * MAX_ERROR[dtype]


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, is_gated: bool) -> None:
    """For 1 to 70 rows, the first of all and the last of all, and in longer batches.

    Case: vllm#5898
    """
    generator = torch.Generator().manual_seed(6)
    weight = packed(generator, [80, 80], 160, dtype, is_gated)
    x = randn(generator, 1100, 160, dtype=dtype)
    together = kernels.linear(x, weight)
    for count in [*range(1, 71), 256, 300, 513]:
        for start in (0, 7, 1100 - count):
            got = kernels.linear(x[start : start + count], weight)
            assert torch.equal(got, together[start : start + count]), f"{count} rows from {start}"


@pytest.mark.parametrize("in_features", [576, 640, 1536, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
def test_long_rows_have_the_same_bits_in_every_batch(dtype: torch.dtype, in_features: int, has_bias: bool) -> None:
    """Panels that stay in a cache between blocks of rows and panels that do not; chunks of fewer rows.

    Case: vllm#5898
    """
    generator = torch.Generator().manual_seed(in_features)
    weight = packed(generator, [70, 30], in_features, dtype)
    bias = randn(generator, 100, dtype=dtype) if has_bias else None
    x = randn(generator, 600, in_features, dtype=dtype)
    together = kernels.linear(x, weight, bias)
    for count in (1, 16, 31, 32, 33, 64, 100, 129, 257, 385, 513):
        for start in (0, 600 - count):
            got = kernels.linear(x[start : start + count], weight, bias)
            assert torch.equal(got, together[start : start + count]), f"{count} rows from {start}"


def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = packed(generator, [50], 70, dtype)
    x = randn(generator, 37, 70, dtype=dtype)
    plain = kernels.linear(x, weight)
    x[3, 69], x[20, 0] = torch.nan, torch.inf
    got = kernels.linear(x, weight)
    assert got[3].isnan().all() and (got[20].isinf() | got[20].isnan()).all()
    others = [i for i in range(37) if i not in (3, 20)]
    assert torch.equal(got[others], plain[others])


def test_gates_of_any_size(dtype: torch.dtype) -> None:
    """Gates so large that e ** -gate is infinite or nothing; NaN and infinity stay in their row."""
    weight = FloatWeight([48, 48], 32, dtype, is_gated=True)
    weight.fill(torch.cat([torch.eye(48, 32), torch.eye(48, 32).fill_(0.125)]).to(dtype))
    largest = torch.finfo(dtype).max / 64
    gates = [0.0, -0.5, 1.0, 20.0, -20.0, -86.5, 86.5, -88.5, 88.5, -120.0, 120.0, -largest, largest]
    x = torch.zeros(40, 32, dtype=dtype)
    x[: len(gates), 3] = torch.tensor(gates, dtype=dtype)
    x[20, 3], x[21, 3], x[22, 3] = torch.nan, torch.inf, -torch.inf
    got = kernels.gated_linear(x, weight)
    finite = [i for i in range(40) if i not in (20, 21, 22)]
    expected = reference_gated(x[finite], weight)
    torch.testing.assert_close(got[finite], expected, rtol=2 * MAX_ERROR[dtype], atol=1e-30)
    assert got[20:23, 3].isnan().tolist() == [True, False, True] and got[21, 3] == torch.inf


def test_no_rows(dtype: torch.dtype) -> None:
    weight = FloatWeight([5], 8, dtype)
    assert kernels.linear(torch.empty(0, 8, dtype=dtype), weight).shape == (0, 5)
    assert kernels.embedding(torch.empty(0, dtype=torch.int64), weight).shape == (0, 8)


def test_rows_that_do_not_lie_together(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    weight = packed(generator, [40], 32, dtype)
    wide = randn(generator, 9, 64, dtype=dtype)
    assert torch.equal(kernels.linear(wide[:, 16:48], weight), kernels.linear(wide[:, 16:48].clone(), weight))


@pytest.mark.parametrize("sizes", [[1], [31, 1], [24, 9, 9], [64, 32], [5, 70, 3]])
@pytest.mark.parametrize("in_features", [1, 32, 45])
def test_packing_loses_nothing(dtype: torch.dtype, sizes: list[int], in_features: int) -> None:
    """Part by part, in any order, whatever the parts' sizes; and rows are found again."""
    generator = torch.Generator().manual_seed(9)
    rows = randn(generator, sum(sizes), in_features, dtype=torch.float32)
    weight = FloatWeight(sizes, in_features, dtype)
    parts = list(zip(weight.parts(), rows.split(sizes), strict=True))
    for part, some in reversed(parts):
        assert part.shape == some.shape and part.dim() == 2
        part.copy_(some)
    assert torch.equal(weight.unpacked(), rows.to(dtype))
    ids = torch.randint(sum(sizes), (21,), generator=generator)
    assert torch.equal(kernels.embedding(ids, weight), rows.to(dtype)[ids])
    assert weight.nbytes >= rows.numel() * dtype.itemsize


def test_packing_a_gate_loses_nothing(dtype: torch.dtype) -> None:
    rows = randn(torch.Generator().manual_seed(10), 2 * 41, 33, dtype=dtype)
    weight = FloatWeight([41, 41], 33, dtype, is_gated=True)
    weight.fill(rows)
    assert torch.equal(weight.unpacked(), rows)


def test_what_does_not_fit_is_refused() -> None:
    weight = FloatWeight([6, 6], 8, torch.float32)
    with pytest.raises(ValueError, match="shape"):
        weight.parts()[0].copy_(torch.zeros(6, 9))
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.linear(torch.zeros(1, 8, dtype=torch.bfloat16), weight)
    with pytest.raises(IndexError, match="12 rows"):
        kernels.embedding(torch.tensor([3, 12]), weight)
    with pytest.raises(ValueError, match="gated"):
        FloatWeight([6, 7], 8, torch.float32, is_gated=True)


def test_weights_are_plain_tensors_where_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loudly, once; and the results agree."""
    monkeypatch.setattr(jit, "unavailable", lambda: "numba is not installed")
    monkeypatch.setattr(jit, "_warned", set())
    generator = torch.Generator().manual_seed(11)
    with caplog.at_level(logging.WARNING):
        plain = [
            matrix.new_weight([20, 20], 33, dtype=dtype, device=CPU, is_gated=True)
            for dtype in (torch.float32, torch.bfloat16)
        ]
    assert [record.message.count("numba is not installed") for record in caplog.records] == [1]
    for weight in plain:
        assert isinstance(weight, torch.Tensor)
        gate_up, x = packed(generator, [20, 20], 33, weight.dtype, is_gated=True), torch.randn(5, 33).to(weight.dtype)
        for part, rows in zip(matrix.weight_parts(weight, [20, 20]), gate_up.unpacked().split([20, 20]), strict=True):
            part.copy_(rows)
        got, expected = kernels.gated_linear(x, weight), kernels.gated_linear(x, gate_up)
        assert error_ratio(got, expected) <= 2 * MAX_ERROR[weight.dtype]


def test_the_environment_takes_a_lesser_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_isa = features.isa.__wrapped__
    monkeypatch.setenv(features.ISA_VARIABLE, "generic")
    assert plain_isa() == "generic"
    monkeypatch.setenv(features.ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="mmx"):
        plain_isa()
