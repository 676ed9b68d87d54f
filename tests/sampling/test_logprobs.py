"""Log-probabilities and ranks against log_softmax and the plain-Python reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import logprobs

VOCAB = 50


@given(
    seed=st.integers(0, 999),
    num_likeliest=st.sampled_from([-1, 0, 1, 5, VOCAB]),
    extra=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    ties=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_equals_reference(seed, num_likeliest, extra, ties):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((4, VOCAB), generator=generator) * 3
    if ties:
        logits = logits.round()
    chosen = torch.randint(0, VOCAB, (4,), generator=generator)
    extra_ids = torch.tensor(extra, dtype=torch.int64) if extra else None
    token_ids, values, ranks = logprobs.gather_logprobs(logits, chosen, num_likeliest, extra_ids)
    for i in range(4):
        expected_ids, expected, rank = logprobs.reference_logprobs(
            logits[i].tolist(), int(chosen[i]), num_likeliest, extra
        )
        assert token_ids[i].tolist() == expected_ids and int(ranks[i]) == rank
        torch.testing.assert_close(values[i], torch.tensor(expected), atol=2e-6, rtol=1e-6)


def test_is_log_softmax_with_the_chosen_first():
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([3, 4, 5])
    token_ids, values, _ = logprobs.gather_logprobs(logits, chosen, 2)
    expected = torch.log_softmax(logits, dim=-1)
    assert torch.equal(values, expected.gather(1, token_ids)) and torch.equal(token_ids[:, 0], chosen)
    assert torch.equal(token_ids[:, 1:], expected.topk(2).indices)


@pytest.mark.parametrize("k", [1, 3, 49])
def test_equal_logits_come_in_order_of_token_id(k):
    logits = torch.zeros((2, VOCAB))
    assert logprobs.ordered_topk(logits, k).tolist() == [list(range(k))] * 2
