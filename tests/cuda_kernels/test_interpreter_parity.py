"""Every operation that has a Triton kernel against its reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CALLS
from test_kernel_parity import error_ratio, outcome

import kernels

DTYPES = [torch.float32, torch.float16]
"""Not bfloat16: the interpreter's arithmetic is wrong there."""
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3}
OF_LOGITS = {
    "argmax",
    "sample",
    "verify_drafts",
    "gather_logprobs",
    "apply_repetition_penalty",
    "apply_output_penalties",
    "add_bias",
    "mask_tokens",
    "apply_bitmask",
}
"""They take float32 whatever the model has."""
WITH_KERNELS = [name for name, operation in kernels.OPERATIONS.items() if "cuda" in operation.implementations]


def test_operations_with_kernels_are_found() -> None:
    assert "silu_and_mul" in WITH_KERNELS


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in WITH_KERNELS for dtype in (DTYPES[:1] if name in OF_LOGITS else DTYPES)],
    ids=str,
)
def test_parity(name: str, dtype: torch.dtype) -> None:
    """In float16 every second of many calls: their options, batches and shapes take turns by odd numbers."""
    operation = kernels.OPERATIONS[name]
    calls = list(CALLS[name](torch.Generator().manual_seed(1), dtype))
    for number, call in enumerate(calls[:: 2 if dtype == torch.float16 and len(calls) > 20 else 1]):
        expected = outcome(operation.reference, call)
        got = outcome(operation.implementations["cuda"], call)
        assert len(got) == len(expected) > 0
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(a.isnan(), b.isnan()), f"call {number}: NaN in other places"
            if b.numel():
                assert error_ratio(a.nan_to_num(), b.nan_to_num()) <= MAX_ERROR[dtype], f"call {number}"
