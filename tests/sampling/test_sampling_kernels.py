"""Sampling against the plain-Python reference, its distribution, and its independence of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels
from kernels import sampling
from kernels.sampling import Draws
from kernels.weights import reference_weight, weights

VOCAB = 300
IMPLEMENTATIONS = {"compiled": sampling.cpu_sample, "torch": sampling.torch_sample}


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def sample(request):
    assert sampling.compiled_kernels() is not None
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=["compiled", "torch"])
def argmax(request):
    return {"compiled": sampling.cpu_argmax, "torch": sampling.torch_argmax}[request.param]


def draws(rows):
    """Draws from a list of dicts; what is missing is off."""

    def column(name, default, dtype):
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    return Draws(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float64),
        seeds=column("seed", 0, torch.int64),
        positions=column("position", 0, torch.int64),
        child_indices=column("child_index", 0, torch.int64),
    )


def f32(x):
    return float(np.float32(x))


@st.composite
def params(draw):
    return {
        "temperature": f32(draw(st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.7, 20.0]))),
        "top_k": draw(st.sampled_from([-1, 0, 1, 2, 5, 50, VOCAB, 10**6])),
        "top_p": f32(draw(st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]))),
        "min_p": f32(draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]))),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "position": draw(st.integers(0, 1 << 20)),
        "child_index": draw(st.integers(0, 5)),
    }


def random_logits(seed, rows=1, vocab=VOCAB, ties=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, vocab), generator=generator) * 4
    if ties:
        logits = logits.round()
    logits[torch.rand((rows, vocab), generator=generator) < 0.1] = -math.inf
    logits[:, 0] = 0.0
    return logits


def scaled_row(logits, temperature):
    return sampling.scale(logits, torch.tensor([temperature], dtype=torch.float32))[0].tolist()


@given(st.lists(params(), min_size=1, max_size=6), st.integers(0, 1000), st.booleans())
@settings(deadline=None, max_examples=150)
def test_truncation_equals_reference(rows, seed, ties):
    logits = random_logits(seed, len(rows), ties=ties)
    d = draws(rows)
    scaled = sampling.scale(logits, d.temperature)
    expected = []
    for i, p in enumerate(rows):
        row = scaled[i].tolist()
        kept = sampling.reference_kept_tokens(row, temperature=1.0, **{k: p[k] for k in ("top_k", "top_p", "min_p")})
        expected.append(sorted(token for _, token in kept))
    sampling.truncate(scaled, d)
    assert [(row > -math.inf).nonzero().flatten().tolist() for row in scaled] == expected


@given(st.lists(params(), min_size=1, max_size=5), st.integers(0, 1000), st.booleans())
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sample_equals_reference(sample, rows, seed, ties):
    """Every token, at every boundary: see weights.py."""
    logits = random_logits(seed, len(rows), ties=ties)
    assert sample(logits, draws(rows)).tolist() == sampling.reference(logits, draws(rows)).tolist()


@st.composite
def odd_logits(draw):
    """Few distinct values, so that every threshold is a tie; huge and tiny ones, negative zero; tails of any length."""
    values = draw(st.sampled_from([[0.0, 1.0], [0.0, -0.0, 1e-45], [3e38, -3e38, 0.0], [-5.0, -5.0000005, -4.9999995]]))
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 100]))
    row = st.lists(st.sampled_from([*values, -math.inf]), min_size=vocab, max_size=vocab)
    return [draw(st.sampled_from(values)), *draw(row)[1:]]


@given(odd_logits(), params())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sample_equals_reference_for_odd_logits(sample, row, p):
    logits = torch.tensor([row])
    assert sample(logits, draws([p])).tolist() == sampling.reference(logits, draws([p])).tolist()


@pytest.mark.parametrize("vocab", [49_152, 50_257])
def test_compiled_equals_torch_over_a_vocabulary(vocab):
    """Flat, peaked and rounded logits with all truncations: where candidates are many and where they are few."""
    generator = torch.Generator().manual_seed(vocab)
    kinds = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 3000, "top_p": 0.99, "temperature": 0.6}]
    kinds += [{"top_p": 0.9999}, {"top_k": vocab - 1}, {"top_k": 1}, {"temperature": 5.0, "top_p": 0.5}]
    for scale in (0.0, 1e-3, 1.0, 4.0, 30.0):
        logits = torch.randn((len(kinds), vocab), generator=generator) * scale
        logits[1::2] = logits[1::2].round()
        d = draws([kind | {"seed": i * 7919, "position": 31 * i} for i, kind in enumerate(kinds)])
        assert torch.equal(sampling.cpu_sample(logits, d), sampling.torch_sample(logits, d)), f"scale {scale}"


@given(st.lists(st.floats(-40.0, 0.0, width=32), min_size=1, max_size=50))
@settings(deadline=None, max_examples=100)
def test_weights_equal_the_reference_and_the_exponential(xs):
    found = weights(torch.tensor(xs, dtype=torch.float32)).tolist()
    assert found == [reference_weight(x) for x in xs]
    np.testing.assert_allclose(found, [math.exp(x) * 2**34 for x in xs], rtol=1e-11, atol=0.51)


@pytest.mark.parametrize("vocab", [1, 2, 257, 5000])
def test_top_p_sorts_more_when_the_mass_needs_it(vocab):
    flat = torch.zeros((2, vocab)) + torch.linspace(0, 1e-3, vocab)
    scaled = flat - flat.amax(dim=-1, keepdim=True)
    threshold = sampling.top_p_threshold(scaled, torch.tensor([0.5, 0.999999], dtype=torch.float64))
    num_kept = (scaled >= threshold[:, None]).sum(dim=-1)
    mass = torch.softmax(scaled.double(), dim=-1).sort(descending=True).values.cumsum(-1)
    for i, p in enumerate((0.5, 0.999999)):
        assert int(num_kept[i]) == int((mass[i] < p).sum()) + 1


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_samples_the_same_alone_and_among_others(sample, num_threads):
    """Case: vllm#5898"""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn((33, 49_152), generator=generator) * 3
        kinds = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 100, "top_p": 0.95, "temperature": 0.7}]
        rows = [kinds[i % 5] | {"seed": i * 7919, "position": 100 + i} for i in range(33)]
        together = sample(logits, draws(rows)).tolist()
        alone = [int(sample(logits[i : i + 1], draws(rows[i : i + 1]))[0]) for i in range(33)]
    finally:
        torch.set_num_threads(before)
    assert together == alone


@pytest.mark.parametrize("p", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.5}])
def test_frequencies_follow_the_distribution(sample, p):
    """Chi-square over 20,000 positions of one seed."""
    num = 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, 0.3, -math.inf])
    kept = sampling.reference_kept_tokens(
        logits.tolist(),
        temperature=p.get("temperature", 1.0),
        top_k=p.get("top_k", 0),
        top_p=p.get("top_p", 1.0),
        min_p=p.get("min_p", 0.0),
    )
    rows = [p | {"seed": 42, "position": i} for i in range(num)]
    tokens = sample(logits.expand(num, -1).clone(), draws(rows))
    counts = np.bincount(tokens.numpy(), minlength=8)
    total = math.fsum(math.exp(x) for x, _ in kept)
    expected = np.zeros(8)
    for x, token in kept:
        expected[token] = num * math.exp(x) / total
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    chi2 = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    assert chi2 < 22.5  # at most 6 degrees of freedom, p = 0.001; the input is fixed, so this never flickers


def test_children_and_seeds_differ(sample):
    logits = torch.zeros((64, 1000))
    base = [{"seed": 5, "position": i} for i in range(64)]
    tokens = {
        name: sample(logits, draws([row | change for row in base])).tolist()
        for name, change in {"base": {}, "again": {}, "child": {"child_index": 1}, "seed": {"seed": 6}}.items()
    }
    assert tokens["base"] == tokens["again"]
    assert sum(a == b for a, b in zip(tokens["base"], tokens["child"], strict=True)) < 5
    assert sum(a == b for a, b in zip(tokens["base"], tokens["seed"], strict=True)) < 5


def test_greedy_takes_the_lowest_of_equal_tokens(argmax):
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert argmax(logits)[0].tolist() == [1, 0] and argmax(logits)[1].tolist() == [3.0, 5.0]
    assert [sampling.reference_sample(row, temperature=0.0, seed=0, position=0) for row in logits.tolist()] == [1, 0]


@pytest.mark.parametrize("vocab", [1, 15, 16, 300, 2048, 2049, 5000, 49_152])
def test_argmax_finds_ties_infinities_and_nan_anywhere(argmax, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((8, vocab), generator=generator)
    places = torch.randint(vocab, (8, 2), generator=generator)
    for row, value in enumerate([math.nan, math.inf, 9.0, -math.inf, 3e38]):
        logits[row, places[row]] = value
    logits[5] = -math.inf
    logits[6] = torch.where(torch.rand(vocab, generator=generator) < 0.5, 0.0, -0.0)
    logits[7, places[7, 0]], logits[7, places[7, 1]] = math.nan, math.inf
    expected, largest = sampling.torch_argmax(logits)
    found = argmax(logits)
    assert found[0].tolist() == expected.tolist()
    assert torch.equal(found[1].nan_to_num(7.0, 8.0, 9.0), largest.nan_to_num(7.0, 8.0, 9.0))
    assert found[1].isnan().tolist() == largest.isnan().tolist() and bool(found[1].isnan().any())


def test_rows_may_lie_apart(sample):
    wide = torch.randn((5, 400), generator=torch.Generator().manual_seed(8))
    d = draws([{"seed": i, "top_k": 20} for i in range(5)])
    assert torch.equal(sample(wide[:, :300], d), sample(wide[:, :300].contiguous(), d))
    assert torch.equal(kernels.argmax(wide[:, 3:200])[0], wide[:, 3:200].argmax(-1))


def test_tiny_temperature_is_greedy_and_never_overflows(sample):
    logits = random_logits(1, rows=4) * 1000
    result = sample(logits, draws([{"temperature": 1e-30, "seed": i} for i in range(4)]))
    assert torch.equal(result, logits.argmax(dim=-1))
