"""The noise: known answers, the reference, and its distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import philox

# From Random123's kat_vectors (philox4x32, 10 rounds): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
word = st.integers(0, 2**32 - 1)


def as_int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox.reference_philox4x32(counter, key) == expected
    tensors = [torch.tensor([x, x]) for x in (*counter, *key)]
    result = philox.philox4x32(tuple(tensors[:4]), tuple(tensors[4:]))
    assert [r.tolist() for r in result] == [[x, x] for x in expected]


@given(st.lists(st.tuples(word, word, word, word, word, word), min_size=1, max_size=20))
@settings(deadline=None, max_examples=50)
def test_philox_equals_reference(rows):
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    result = philox.philox4x32(tuple(columns[:4]), tuple(columns[4:]))
    expected = [philox.reference_philox4x32(row[:4], row[4:]) for row in rows]
    assert list(zip(*[r.tolist() for r in result], strict=True)) == expected


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    child=st.integers(0, 127),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=100)
def test_gumbel_noise_equals_reference(seed, position, child, tokens):
    rows = [torch.tensor([x]) for x in (as_int64(seed), position, child)]
    noise = philox.gumbel_noise(*rows, torch.tensor([tokens]))
    expected = [np.float32(philox.reference_gumbel_noise(seed, position, child, token)) for token in tokens]
    # One float32 step: where the float64 logarithms of two libraries round to different sides.
    np.testing.assert_array_max_ulp(noise[0].numpy(), np.array(expected), maxulp=1)


def test_noise_does_not_depend_on_rows_or_chunks():
    tokens = torch.arange(40_000).expand(3, -1)
    seeds, positions, children = torch.tensor([1, -5, 2**62]), torch.tensor([0, 7, 2**31 - 1]), torch.tensor([0, 1, 99])
    together = philox.noise_words(seeds, positions, children, tokens)
    for i in range(3):
        one = slice(i, i + 1)
        alone = philox.noise_words(seeds[one], positions[one], children[one], tokens[one, 1234:1300])
        assert torch.equal(alone, together[one, 1234:1300])


@pytest.mark.parametrize("vary", ["seed", "position", "child", "token"])
def test_words_are_uniform_and_uncorrelated(vary):
    num = 1 << 16
    index = torch.arange(num)
    zero = torch.zeros(num, dtype=torch.int64)
    seeds, positions, children, tokens = (
        index if vary == name else zero for name in ("seed", "position", "child", "token")
    )
    words = philox.noise_words(seeds, positions, children, tokens[:, None]).flatten().numpy()
    for shift in (28, 0):  # high and low bits
        counts = np.bincount((words >> shift) & 15, minlength=16)
        chi2 = float(((counts - num / 16) ** 2 / (num / 16)).sum())
        assert chi2 < 37.7  # 15 degrees of freedom, p = 0.001; the input is fixed, so this never flickers
    u = words / 2**32
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(num)


def test_extremes_are_finite():
    assert -math.log(-math.log1p(-0.5 / 2**32)) < philox.MAX_GUMBEL
    words = torch.tensor([0, 2**32 - 1], dtype=torch.float64)
    u = (words + 0.5) * 2.0**-32
    noise = -torch.log(-torch.log1p(-u))
    assert torch.isfinite(noise).all() and float(noise[0]) < philox.MAX_GUMBEL and float(noise[1]) > -3.2
