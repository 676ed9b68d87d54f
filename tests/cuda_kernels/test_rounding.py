"""Kernels round where their references do: an order of their own would pass for parity, but its bits differ."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CALLS
from test_kernel_parity import outcome

import kernels

LEAST_EQUAL = {
    "rms_norm": 0.998,
    "rotate_and_write_kv": 0.998,
    "silu_and_mul": 0.998,
    "gelu_and_mul": 0.95,
    "gelu_tanh_and_mul": 0.95,
}
"""Part of the numbers. Sums in another order cost a few of the others; GELU's references cancel far below zero."""


@pytest.mark.parametrize("name", LEAST_EQUAL)
def test_nearly_all_bits_are_the_references(name: str) -> None:
    operation = kernels.OPERATIONS[name]
    are_equal = []
    for call in CALLS[name](torch.Generator().manual_seed(6), torch.float16):
        expected = outcome(operation.reference, call)
        got = outcome(operation.implementations["cuda"], call)
        are_equal += [torch.eq(a, b)[~b.isnan()] for a, b in zip(got, expected, strict=True)]
    together = torch.cat(are_equal).float()
    assert together.numel() > 1000 and float(together.mean()) >= LEAST_EQUAL[name], float(together.mean())
