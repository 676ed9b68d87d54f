"""The sampling kernels choose the reference's token, whatever the logits and the truncations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels import philox, sampling
from kernels.cuda import sampling as cuda_sampling
from kernels.cuda.philox import gumbel, gumbel_bound, noise_words
from kernels.cuda.sampling_collect import COUNT_WORD, WIDE_WORD
from kernels.cuda.sampling_math import EXACT, weigh
from kernels.sampling import Draws
from kernels.weights import weights

BLOCK = 512


def chosen(generator: torch.Generator, values: list[float], dtype: torch.dtype, rows: int) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=generator)]


def random_draws(generator: torch.Generator, rows: int, vocab_size: int) -> Draws:
    return Draws(
        temperature=chosen(generator, [0.01, 0.3, 0.7, 1.0, 1.7, 20.0], torch.float32, rows),
        top_k=chosen(generator, [-1, 0, 1, 2, 5, 50, vocab_size - 1, vocab_size, 10**6], torch.int64, rows),
        top_p=chosen(generator, [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0], torch.float64, rows),
        min_p=chosen(generator, [0.0, 0.0, 0.01, 0.3, 1.0], torch.float64, rows),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        positions=torch.randint(1 << 20, (rows,), generator=generator),
        child_indices=torch.arange(rows) % 3,
    )


def draws_of(rows: int, **columns: list[float]) -> Draws:
    """Columns repeated to so many rows; what is missing is off."""
    kinds = {"temperature": (1.0, torch.float32), "top_k": (0, torch.int64), "top_p": (1.0, torch.float64)}
    kinds |= {"min_p": (0.0, torch.float64), "seeds": (0, torch.int64)}
    made = {
        name: torch.tensor((columns.get(name, [default]) * rows)[:rows], dtype=dtype)
        for name, (default, dtype) in kinds.items()
    }
    return Draws(**made, positions=torch.arange(rows), child_indices=torch.zeros(rows, dtype=torch.int64))


@triton.jit
def _noise(token_ids, position, child_index, seed, words, noise, bounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    word = noise_words(tl.load(token_ids + places), tl.load(position), tl.load(child_index), tl.load(seed))
    value, bound = gumbel(word), gumbel_bound(word)
    tl.store(words + places, word.to(tl.int64))
    tl.store(noise + places, value)
    tl.store(bounds + places, bound)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234567890ABCDEF])
def test_noise_equals_the_cpus_to_the_last_bit(seed: int) -> None:
    token_ids = torch.arange(BLOCK, dtype=torch.int32) * 513
    scalars = [torch.tensor([x], dtype=torch.int64) for x in (131_071, 3, seed)]
    words, noise = torch.empty(BLOCK, dtype=torch.int64), torch.empty(BLOCK)
    bounds = torch.empty(BLOCK)
    _noise[(1,)](token_ids, *scalars, words, noise, bounds, BLOCK=BLOCK, **EXACT)
    position, child_index, key = scalars
    assert torch.equal(words, philox.noise_words(key, position, child_index, token_ids[None].long())[0])
    assert torch.equal(noise, philox.gumbel_noise(key, position, child_index, token_ids[None].long())[0])
    assert bool((bounds >= noise).all())
    first = philox.reference_philox4x32((131_071, 513, 3, 0), (seed % 2**64 & philox.MASK, seed % 2**64 >> 32))[0]
    assert int(words[1]) == first


@triton.jit
def _of_words(words, noise, bounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    word = tl.load(words + places).to(tl.uint32)
    value, bound = gumbel(word), gumbel_bound(word)
    tl.store(noise + places, value)
    tl.store(bounds + places, bound)


def test_noise_of_the_outermost_words_is_finite_and_bounded() -> None:
    words = torch.cat([torch.arange(256), 2**32 - 1 - torch.arange(256)])
    noise, bounds = torch.empty(BLOCK), torch.empty(BLOCK)
    _of_words[(1,)](words, noise, bounds, BLOCK=BLOCK, **EXACT)
    expected = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words.tolist()]
    assert torch.equal(noise, torch.tensor(expected, dtype=torch.float64).float())
    assert bool((bounds >= noise).all()) and float(noise.max()) <= philox.MAX_GUMBEL


@triton.jit
def _weights(scaled, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    weight = weigh(tl.load(scaled + places))
    tl.store(out + places, weight)


def test_weights_equal_the_cpus() -> None:
    scaled = torch.cat([torch.tensor([0.0, -0.0, -math.inf, -3e38, -1e-45]), -torch.rand(BLOCK - 5) * 30])
    out = torch.empty(BLOCK, dtype=torch.int64)
    _weights[(1,)](scaled, out, BLOCK=BLOCK, **EXACT)
    assert out.tolist() == weights(scaled).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "rows", "capacity"),
    [(1, 6, 64), (300, 60, 8192), (1000, 30, 40), (1025, 20, 8192), (5000, 14, 500)],
)
def test_sample_equals_reference(vocab_size: int, rows: int, capacity: int) -> None:
    """Random rows, half of them with ties, a tenth of the tokens forbidden; lists that suffice and that overflow."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator) * chosen(
        generator, [0.01, 1.0, 4.0, 30.0], torch.float32, rows
    ).unsqueeze(1)
    logits[::2] = logits[::2].round()
    logits[torch.rand(rows, vocab_size, generator=generator) < 0.1] = -math.inf
    logits[:, vocab_size // 2] = 0.0
    draws = random_draws(generator, rows, vocab_size)
    expected = sampling.reference(logits, draws)
    got = cuda_sampling.sample(logits, draws, capacity)
    assert got.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:overflow")  # of a difference of huge logits, which is to be infinite
@pytest.mark.parametrize("capacity", [16, 8192])
@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0], [0.0, -0.0, 1e-45], [3e38, -3e38, 0.0], [-5.0, -5.0000005, -4.9999995], [100.0, 99.9, 98.0], [-200.0]],
    ids=str,
)
def test_sample_equals_reference_for_odd_logits(values: list[float], capacity: int) -> None:
    """Few distinct values, so that every threshold is a tie; huge and tiny ones; outside the bins; few finite ones."""
    generator = torch.Generator().manual_seed(len(values))
    logits = chosen(generator, [*values, -math.inf], torch.float32, 6 * 100).reshape(6, 100)
    logits[3:, 3:] = -math.inf
    logits[:, 2] = values[0]
    draws = random_draws(generator, 6, 100)
    draws.top_k[::3] = 4
    draws.top_p[1::3] = 0.7
    assert cuda_sampling.sample(logits, draws, capacity).tolist() == sampling.reference(logits, draws).tolist()


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
def test_lists_of_flat_rows_have_only_what_lies_about_the_threshold(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a single program would search the whole row again and again."""
    seen: list[torch.Tensor] = []

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                seen.append(args[12].clone())
                choose[grid](*args, **kwargs)

            return launch

    choose = cuda_sampling.choose
    monkeypatch.setattr(cuda_sampling, "choose", Spy())
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(6)) * spread
    draws = draws_of(3, seeds=list(range(3)), top_p=[0.5, 0.9, 0.95])
    tokens = cuda_sampling.sample(logits, draws, 100)
    assert tokens.tolist() == sampling.reference(logits, draws).tolist()
    counts, is_wide = (seen[0][:, word.value] for word in (COUNT_WORD, WIDE_WORD))
    assert int(is_wide.sum()) >= 2
    assert int(counts[is_wide != 0].max()) <= 20


def test_flat_logits_with_every_truncation() -> None:
    """More candidates than a list holds, in one bin and in many."""
    generator = torch.Generator().manual_seed(5)
    kinds = {"top_p": [0.3, 0.9, 0.999, 1.0, 0.5], "top_k": [0, 0, 900, 1500, 1999], "temperature": [1.0, 5.0, 0.7]}
    for spread in (0.0, 1e-3, 1.0, 3.0):
        logits = torch.randn(5, 2000, generator=generator) * spread
        draws = draws_of(5, seeds=list(range(5)), **kinds)
        expected = sampling.cpu_sample(logits, draws)
        assert torch.equal(cuda_sampling.sample(logits, draws, 128), expected), f"spread {spread}"


def test_temperature_zero_takes_the_lowest_of_the_likeliest() -> None:
    logits = torch.randn(4, 2500, generator=torch.Generator().manual_seed(9)).round()
    logits[1, 0] = math.nan
    draws = draws_of(4, temperature=[0.0], top_k=[5], top_p=[0.5])
    tokens = cuda_sampling.sample(logits, draws)
    assert tokens[[0, 2, 3]].tolist() == logits.argmax(dim=-1)[[0, 2, 3]].tolist()
    assert 0 <= int(tokens[1]) < 2500  # of no meaning, but a token


@pytest.mark.parametrize("vocab_size", [1, 15, 300, 2048, 2049, 5000])
def test_argmax_finds_ties_infinities_and_nan_anywhere(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((8, vocab_size), generator=generator)
    places = torch.randint(vocab_size, (8, 2), generator=generator)
    for row, value in enumerate([math.nan, math.inf, 9.0, -math.inf, 3e38]):
        logits[row, places[row]] = value
    logits[5] = -math.inf
    logits[6] = torch.where(torch.rand(vocab_size, generator=generator) < 0.5, 0.0, -0.0)
    logits[7, places[7, 0]], logits[7, places[7, 1]] = math.nan, math.inf
    expected, largest = sampling.torch_argmax(logits)
    got = cuda_sampling.argmax(logits)
    assert got[0].tolist() == expected.tolist()
    assert torch.equal(got[1].view(torch.int32), largest.view(torch.int32))


def test_rows_may_lie_apart() -> None:
    wide = torch.randn((3, 400), generator=torch.Generator().manual_seed(8))
    draws = draws_of(3, seeds=[1, 2, 3], top_k=[20, 0, 0], top_p=[1.0, 0.9, 1.0])
    part = wide[:, 7:300]
    assert torch.equal(cuda_sampling.sample(part, draws), sampling.cpu_sample(part.contiguous(), draws))
    assert torch.equal(cuda_sampling.argmax(part)[0], part.argmax(-1))


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (1, 128_256), (3, 50_257), (256, 262_144), (4000, 151_936)])
def test_segments_cover_every_logit_once(rows: int, vocab_size: int) -> None:
    count, size = cuda_sampling.segments(rows, vocab_size, cuda_sampling.BLOCK)
    assert size % cuda_sampling.BLOCK == 0 and 1 <= count <= 128
    assert (count - 1) * size < vocab_size <= count * size
