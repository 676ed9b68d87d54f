"""Log-probabilities and ranks against log_softmax and the plain-Python reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import logprobs

VOCAB = 50


@pytest.fixture(params=["compiled", "torch"])
def gather_logprobs(request):
    return {"compiled": logprobs.cpu_gather_logprobs, "torch": logprobs.torch_gather_logprobs}[request.param]


@given(
    seed=st.integers(0, 999),
    num_likeliest=st.sampled_from([-1, 0, 1, 5, VOCAB]),
    extra=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    ties=st.booleans(),
)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(gather_logprobs, seed, num_likeliest, extra, ties):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((4, VOCAB), generator=generator) * 3
    if ties:
        logits = logits.round()
    chosen = torch.randint(0, VOCAB, (4,), generator=generator)
    extra_ids = torch.tensor(extra, dtype=torch.int64) if extra else None
    token_ids, values, ranks = gather_logprobs(logits, chosen, num_likeliest, extra_ids)
    for i in range(4):
        expected_ids, expected, rank = logprobs.reference_logprobs(
            logits[i].tolist(), int(chosen[i]), num_likeliest, extra
        )
        assert token_ids[i].tolist() == expected_ids and int(ranks[i]) == rank
        torch.testing.assert_close(values[i], torch.tensor(expected), atol=2e-6, rtol=1e-6)


def test_is_log_softmax_with_the_chosen_first(gather_logprobs):
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([3, 4, 5])
    token_ids, values, _ = gather_logprobs(logits, chosen, 2)
    expected = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(values, expected.gather(1, token_ids))
    assert torch.equal(token_ids[:, 0], chosen)
    assert torch.equal(token_ids[:, 1:], expected.topk(2).indices)


@pytest.mark.parametrize("k", [1, 3, 49])
def test_equal_logits_come_in_order_of_token_id(k):
    logits = torch.zeros((2, VOCAB))
    assert logprobs.ordered_topk(logits, k).tolist() == [list(range(k))] * 2


@pytest.mark.parametrize("num_likeliest", [0, 1, 20, 128, 129, 1000])
def test_compiled_equals_torch_over_a_vocabulary(num_likeliest):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn((5, 50_257), generator=generator) * 5
    logits[1] = logits[1].round()
    logits[2, 40:] = -torch.inf
    logits[3] = 2.5
    chosen = torch.randint(40, (5,), generator=generator)
    found = logprobs.cpu_gather_logprobs(logits, chosen, num_likeliest)
    expected = logprobs.torch_gather_logprobs(logits, chosen, num_likeliest)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, found[0]).float()
    atol = 1e-6 if num_likeliest <= 128 else 1e-5  # torch sums in float32
    torch.testing.assert_close(found[1], exact, atol=atol, rtol=1e-6)


def test_a_row_does_not_depend_on_the_rows_beside_it(gather_logprobs):
    """Case: vllm#5898"""
    logits = torch.randn((9, 50_257), generator=torch.Generator().manual_seed(9)) * 3
    chosen = torch.arange(9) * 100
    together = gather_logprobs(logits, chosen, 5)
    for i in range(9):
        alone = gather_logprobs(logits[i : i + 1], chosen[i : i + 1], 5)
        assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(alone, together, strict=True))
