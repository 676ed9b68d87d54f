"""Log-probabilities, penalties and masks by Triton kernels, where exactness or order matters."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import CALLS
from test_kernel_parity import outcome

import kernels
from kernels import logprobs
from kernels.cuda import logprobs as cuda_logprobs


@pytest.mark.parametrize("num_likeliest", [0, 1, 7, 20, 299, 300, -1])
def test_candidates_come_in_the_documented_order(num_likeliest: int) -> None:
    """Ties everywhere, both zeros among them, and tokens that are forbidden."""
    generator = torch.Generator().manual_seed(num_likeliest)
    logits = (torch.randn(6, 300, generator=generator) * 2).round()
    logits[3] = torch.where(torch.rand(300, generator=generator) < 0.5, 0.0, -0.0)
    logits[4, 5:] = -math.inf
    logits[5] += 1000
    picked = torch.tensor([0, 299, 7, 3, 200, 150])
    extra = torch.tensor([299, 0])
    expected = logprobs.reference(logits, picked, num_likeliest, extra)
    got = cuda_logprobs.gather_logprobs(logits, picked, num_likeliest, extra)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[2], expected[2])


def test_a_long_row_is_summed_in_segments() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * 4
    logits[1, :2048] = -math.inf  # whole segments of nothing
    picked = torch.tensor([4999, 10])
    got = cuda_logprobs.gather_logprobs(logits, picked, 3)
    expected = logprobs.torch_gather_logprobs(logits, picked, 3)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=2e-6)


EXACT = [
    "apply_repetition_penalty",
    "apply_output_penalties",
    "add_bias",
    "mask_tokens",
    "apply_bitmask",
    "verify_drafts",
]


@pytest.mark.parametrize("name", EXACT)
def test_no_bit_differs_from_the_reference(name: str) -> None:
    """A penalty that is rounded otherwise would sample another token than the CPU."""
    operation = kernels.OPERATIONS[name]
    for seed in range(1 if name == "verify_drafts" else 3):  # it samples for each of dozens of drafts
        for call in CALLS[name](torch.Generator().manual_seed(seed), torch.float32):
            expected = outcome(operation.reference, call)
            for kind in ("cpu", "cuda"):
                got = outcome(operation.implementations[kind], call)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), kind


def test_a_forbidden_token_stays_forbidden() -> None:
    """No later processor lifts -inf."""
    rows, token_ids = torch.tensor([0, 0]), torch.tensor([1, 2])
    for name, columns in {
        "apply_repetition_penalty": [2.0],
        "apply_output_penalties": [3.0, 1.0, 1.0],
        "add_bias": [9.0],
    }.items():
        logits = torch.full((1, 3), -math.inf)
        kernels.OPERATIONS[name].implementations["cuda"](
            logits, rows, token_ids, *(torch.full((2,), x) for x in columns)
        )
        assert bool((logits == -math.inf).all()), name
