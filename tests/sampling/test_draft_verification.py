"""Draft verification: what is emitted is what would have been sampled one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import draft_verification, sampling
from kernels.draft_verification import accept_drafts, cpu_verify_drafts, reference, torch_verify_drafts
from kernels.sampling import Draws

VOCAB = 13


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def draws(positions: int, temperature: float) -> Draws:
    return Draws(
        temperature=torch.full((positions,), temperature),
        top_k=torch.zeros(positions, dtype=torch.int64),
        top_p=torch.ones(positions, dtype=torch.float64),
        min_p=torch.zeros(positions, dtype=torch.float64),
        seeds=torch.full((positions,), 77),
        positions=torch.arange(positions),
        child_indices=torch.zeros(positions, dtype=torch.int64),
    )


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=6), st.integers(0, 10_000), st.sampled_from([0.0, 0.8]))
@settings(deadline=None, max_examples=60)
def test_implementations_equal_the_reference(num_drafts: list[int], seed: int, temperature: float) -> None:
    """Rows with -1 drafts sample nothing; drafts are right up to a random place."""
    generator = torch.Generator().manual_seed(seed)
    positions = sum(n + 1 for n in num_drafts)
    logits = torch.randn(positions, VOCAB, generator=generator) * 2
    d = draws(positions, temperature)
    sampled = sampling.torch_argmax(logits)[0] if temperature == 0.0 else sampling.reference(logits, d)
    drafts, start = [], 0
    for n in num_drafts:
        right = int(torch.randint(n + 2, (1,), generator=generator))
        drafts += [(int(t) + (i >= right)) % VOCAB for i, t in enumerate(sampled[start : start + max(n, 0)])]
        start += n + 1
    args = (
        logits,
        starts([n + 1 for n in num_drafts]),
        torch.tensor(drafts, dtype=torch.int64),
        starts([max(n, 0) for n in num_drafts]),
        d,
    )
    expected = reference(*args)
    assert int(expected[1].sum()) == int((expected[0] >= 0).sum())
    for verify in (torch_verify_drafts, cpu_verify_drafts):
        got = verify(*args)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    ("sampled", "drafts", "emitted"),
    [
        ([4, 5, 6], [4, 5], [4, 5, 6]),
        ([4, 5, 6], [4, 9], [4, 5]),
        ([4, 5, 6], [9, 5], [4]),
        ([4], [], [4]),
        ([], [], []),
    ],
)
def test_the_equal_prefix_and_one_more_are_emitted(sampled: list[int], drafts: list[int], emitted: list[int]) -> None:
    """A right draft behind a wrong one is not accepted: it was computed after the wrong one."""
    tokens, count = accept_drafts(
        torch.tensor(sampled, dtype=torch.int64),
        starts([len(sampled)]),
        torch.tensor(drafts, dtype=torch.int64),
        starts([len(drafts)]),
    )
    assert tokens.tolist() == emitted + [-1] * (len(sampled) - len(emitted))
    assert count.tolist() == [len(emitted)]


def test_without_triton_cuda_verifies_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_verification, "compiled_for_cuda", lambda name: None)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    args = (logits, starts([3]), torch.tensor([1, 2]), starts([2]), draws(3, 1.0))
    got, expected = draft_verification.cuda_verify_drafts(*args), reference(*args)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
