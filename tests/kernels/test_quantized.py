"""Quantized weights in every instruction set that this machine has: parity with the reference, sameness, packing."""

from __future__ import annotations

import gguf
import numba
import numpy as np
import pytest
import torch
from kernel_cases import randn

from kernels import quantized
from kernels.cpu import features, quant_dots
from kernels.quantized import ChannelWeight, GroupedWeight, QuantizedWeight, reference
from worker_svc.models.gguf_files import BlockTensor
from worker_svc.models.quantized_weights import GgufWeight

USABLE_ISAS = features.ISAS[features.ISAS.index(features.isa()) :]
SCHEMES = ["channel", "4", "4 min", "8", "8 min"]


@pytest.fixture(params=USABLE_ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(features, "isa", lambda: request.param)
    monkeypatch.setattr(quantized, "isa", lambda: request.param)
    return str(request.param)


def made(
    scheme: str, sizes: list[int], in_features: int, dtype: torch.dtype, is_gated: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(in_features)
    bits, _, mins = scheme.partition(" ")
    weight: QuantizedWeight
    if scheme == "channel":
        weight = ChannelWeight(sizes, in_features, dtype, is_gated)
    else:
        weight = GroupedWeight(sizes, in_features, dtype, is_gated, bits=int(bits), has_mins=bool(mins))
    weight.fill(randn(generator, sum(sizes), in_features, dtype=torch.float32) / in_features**0.5)
    return weight


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 17, 47, 70])
def test_products_agree_with_the_reference(isa: str, scheme: str, num_rows: int) -> None:
    weight = made(scheme, [40, 9], 96, torch.float32)
    x = randn(torch.Generator().manual_seed(num_rows), num_rows, 96, dtype=torch.float32)
    bias = torch.linspace(-1, 1, 49)
    # Many rows of a grouped weight are multiplied in bfloat16, without rounding activations to bytes.
    is_tiles = isa == "amx" and isinstance(weight, GroupedWeight) and num_rows >= weight.TILES_FROM
    expected = x @ weight.unpacked().T + bias if is_tiles else reference(x, weight, bias)
    assert relative_error(weight.multiply(x, bias), expected) < (6e-3 if is_tiles else 2e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gates_and_bfloat16(isa: str, scheme: str) -> None:
    weight = made(scheme, [48, 48], 64, torch.bfloat16, is_gated=True)
    x = randn(torch.Generator().manual_seed(3), 7, 64, dtype=torch.bfloat16)
    got = weight.multiply(x)
    assert got.dtype == torch.bfloat16 and got.shape == (7, 48)
    assert relative_error(got, reference(x, weight)) < 1e-2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_has_the_same_bits_in_every_batch(isa: str, scheme: str) -> None:
    weight = made(scheme, [64], 128, torch.float32)
    x = randn(torch.Generator().manual_seed(4), 45, 128, dtype=torch.float32)
    alone = torch.cat([weight.multiply(row[None]) for row in x])
    for count in (2, 4, 15, 16, 33, 45):
        first = weight.multiply(x[:count])
        if isa == "amx" and isinstance(weight, GroupedWeight) and count >= weight.TILES_FROM:
            # In bfloat16 from here on, and again the same for every number of rows.
            assert torch.equal(first, weight.multiply(x)[:count])
        else:
            assert torch.equal(first, alone[:count])
            assert torch.equal(weight.multiply(x[45 - count :]), alone[45 - count :])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_is_near_what_was_given(scheme: str) -> None:
    generator = torch.Generator().manual_seed(64)
    weight = made(scheme, [20, 13], 64, torch.float32)
    given = randn(generator, 33, 64, dtype=torch.float32) / 8
    assert relative_error(weight.unpacked(), given) < (0.12 if scheme.startswith("4") else 0.01)
    ids = torch.tensor([0, 32, 20, 19])
    assert torch.equal(weight.rows(ids), weight.unpacked()[ids])
    with pytest.raises(IndexError, match=r"ids lie in \[0, 33\], the matrix has 33 rows"):
        weight.rows(torch.tensor([0, 33]))


def test_sums_are_the_same_without_instructions_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without AVX512-VNNI: compiled anew as for them, for what the instructions give."""
    values = torch.arange(64, dtype=torch.uint8).repeat(8).sub_(40).contiguous()
    weights = torch.randint(256, (4, 64 * 16), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    start = torch.tensor([-1234, 0], dtype=torch.int32)
    out = torch.empty(2, 2, 2, 16, dtype=torch.int32)
    for way, has_vnni in enumerate((quant_dots.HAS_VNNI, False)):
        monkeypatch.setattr(quant_dots, "HAS_VNNI", has_vnni)

        @numba.njit  # type: ignore[untyped-decorator]
        def product(x, starts, panels, result):  # type: ignore[no-untyped-def]
            quant_dots.channel_pair(2, x, starts, 0, panels, 64 * 16, 16, result)

        product(values.data_ptr(), start.data_ptr(), weights.data_ptr(), out[way].data_ptr())
    numbers = weights[:2].view(2, 16, 16, 4).permute(0, 2, 1, 3).reshape(32, 64).int()
    expected = -1234 + (numbers * values[:64].view(torch.int8).int()).sum(dim=1)
    for way in range(2):
        for row in range(2):
            assert torch.equal(out[way, row].flatten(), expected.int())


def test_zeros_stay_zeros(isa: str) -> None:
    for scheme in SCHEMES:
        weight = made(scheme, [16], 32, torch.float32)
        assert weight.multiply(torch.zeros(2, 32)).abs().sum() == 0
        weight.fill(torch.zeros(16, 32))
        assert weight.multiply(torch.ones(2, 32)).abs().sum() == 0


def block_tensor(rows: np.ndarray, type_name: str) -> BlockTensor:
    kind = gguf.GGMLQuantizationType[type_name]
    return BlockTensor(torch.Size(rows.shape), type_name, torch.from_numpy(gguf.quantize(rows, kind)))


@pytest.mark.parametrize(
    "types", [("Q4_0",), ("Q4_1",), ("Q8_0",), ("Q4_1", "Q8_0"), ("Q4_0", "Q4_1"), ("Q5_0", "Q8_0")]
)
def test_blocks_of_a_gguf_file_are_kept_exactly(types: tuple[str, ...]) -> None:
    """Whatever types the projections of one weight have; one that is not multiplied as it is becomes bfloat16."""
    rng = np.random.default_rng(0)
    tensors = [block_tensor(rng.standard_normal((24, 64), np.float32), name) for name in types]
    weight = GgufWeight([24] * len(types), 64, torch.float32)
    for part, tensor in zip(weight.parts(), tensors, strict=True):
        part.copy_(tensor)  # type: ignore[arg-type]
    expected = torch.cat([tensor.dequantized() for tensor in tensors])
    assert torch.allclose(weight.unpacked(), expected, atol=1e-6)
    x = randn(torch.Generator().manual_seed(1), 3, 64, dtype=torch.float32)
    assert relative_error(weight.multiply(x), x @ expected.T) < 0.02


def test_group_size_is_checked() -> None:
    with pytest.raises(ValueError, match="in_features is 40: must be a multiple of 32"):
        GroupedWeight([16], 40, torch.float32)
