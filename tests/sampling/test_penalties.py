"""Logits processors one by one against their naive references."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import penalties

VOCAB = 70
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def logits_of(seed, rows=2):
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 5


@given(tokens, st.sampled_from([0.5, 1.0, 1.3, 2.0]), st.integers(0, 99))
@settings(deadline=None)
def test_repetition_penalty(seen, penalty, seed):
    logits = logits_of(seed)
    expected = penalties.reference_repetition_penalty(logits[1].tolist(), seen, penalty)
    untouched = logits[0].clone()
    ids = torch.tensor(sorted(set(seen)), dtype=torch.int64)
    penalties.apply_repetition_penalty(logits, torch.ones_like(ids), ids, torch.full((len(ids),), penalty))
    torch.testing.assert_close(logits[1], torch.tensor(expected))
    assert torch.equal(logits[0], untouched)


@given(tokens, st.sampled_from([-2.0, 0.0, 0.5, 2.0]), st.sampled_from([-1.0, 0.0, 1.5]), st.integers(0, 99))
@settings(deadline=None)
def test_presence_and_frequency_penalties(output, frequency, presence, seed):
    logits = logits_of(seed)
    expected = penalties.reference_output_penalties(logits[1].tolist(), output, frequency, presence)
    ids, counts = torch.tensor(output, dtype=torch.int64).unique(return_counts=True)
    full = torch.ones(len(ids))
    penalties.apply_output_penalties(
        logits, torch.ones_like(ids), ids, counts.float(), full * frequency, full * presence
    )
    torch.testing.assert_close(logits[1], torch.tensor(expected))


def test_masks_and_bias_touch_only_what_they_name():
    logits = torch.zeros((3, VOCAB))
    penalties.add_bias(logits, torch.tensor([0, 2]), torch.tensor([5, 6]), torch.tensor([1.5, -2.0]))
    assert logits[0, 5] == 1.5 and logits[2, 6] == -2.0 and int((logits != 0).sum()) == 2
    penalties.mask_tokens(logits, torch.tensor([0]), torch.tensor([5]))
    assert logits[0, 5] == -math.inf and int(logits.isinf().sum()) == 1
    penalties.keep_only_tokens(logits, 2, torch.tensor([6, 7, 7]))
    assert logits[2, 6] == -2.0 and logits[2, 7] == 0.0 and int(logits[2].isinf().sum()) == VOCAB - 2


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), st.integers(0, 99))
@settings(deadline=None)
def test_bitmask(words, seed):
    logits = logits_of(seed)
    expected = penalties.reference_bitmask(logits[1].tolist(), words)
    untouched = logits[0].clone()
    penalties.apply_bitmask(logits, torch.tensor([1]), torch.tensor([words], dtype=torch.int32))
    assert torch.equal(logits[1], torch.tensor(expected)) and torch.equal(logits[0], untouched)
