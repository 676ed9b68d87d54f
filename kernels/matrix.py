"""linear, gated_linear, logits, embedding: operations with a weight, whose rows do not depend on how many there are.

A weight is a plain tensor or a PackedWeight; `new_weight` makes what runs best. Plain tensors: in float32 on a CPU the
library picks another order of summation for a single row, and for fewer than 16 rows where the weight lies row by row.
Weights that lie column by column and at least two rows give one order, with one thread of torch at least: with two,
MKL splits long sums for some numbers of rows on some processors. Packed weights always have one order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels import activation
from kernels.cpu import jit
from kernels.dispatch import is_interpreting
from kernels.float_weight import DTYPES, FloatWeight
from kernels.packed_weight import PackedWeight, WeightPart

logger = logging.getLogger(__name__)
Weight = torch.Tensor | PackedWeight


def reference(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias.

    x [num_rows, in_features], weight [out_features, in_features] in any memory layout, bias [out_features]. Returns
    [num_rows, out_features] in x's type; sums are float32.
    """
    matrix = _plain(weight)
    out = torch.empty(x.shape[0], matrix.shape[0], dtype=x.dtype, device=x.device)
    for i, row in enumerate(x):
        total = (matrix.float() * row.float()).sum(dim=1)
        out[i] = (total if bias is None else total + bias.float()).to(x.dtype)
    return out


def cpu_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference`."""
    if isinstance(weight, PackedWeight):
        return weight.multiply(x, bias)
    return torch_linear(x, weight, bias)


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference`."""
    if x.shape[0] == 1 and x.dtype == torch.float32 and x.device.type == "cpu":
        return F.linear(x.expand(2, -1), weight, bias)[:1]
    return F.linear(x, weight, bias)


def reference_gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the halves of x @ weight.T + bias.

    As `linear` and `silu_and_mul` after it: the product is rounded to x's type. Returns [num_rows, out_features / 2].
    """
    return activation.reference(reference(x, weight, bias))


def cpu_gated_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference_gated`."""
    if isinstance(weight, PackedWeight):
        return weight.multiply(x, bias)
    return activation.torch_silu_and_mul(torch_linear(x, weight, bias))


def cuda_gated_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference_gated`."""
    return activation.cuda_silu_and_mul(torch_linear(x, _plain(weight), bias))


def reference_logits(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x @ weight.T as float32 [num_rows, out_features]; whether it was rounded to x's type between is left open."""
    return reference(x, weight).float()


def cpu_logits(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """See `reference_logits`. A packed weight's sums are not rounded."""
    if isinstance(weight, PackedWeight):
        return weight.multiply(x, None, torch.float32)
    return torch_linear(x, weight).float()


def reference_embedding(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The weight's rows ids [num_tokens] int64: [num_tokens, in_features]."""
    matrix = _plain(weight)
    return torch.stack([matrix[i] for i in ids.tolist()]) if len(ids) else matrix[:0].clone()


def cpu_embedding(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """See `reference_embedding`."""
    return weight.rows(ids) if isinstance(weight, PackedWeight) else F.embedding(ids, weight)


def new_weight(
    part_sizes: Sequence[int], in_features: int, *, dtype: torch.dtype, device: torch.device, is_gated: bool = False
) -> Weight:
    """An unfilled weight of one or several projections (parts), one below the other, as it runs best on a device."""
    if device.type == "cpu" and dtype in DTYPES and not is_interpreting():
        if (problem := jit.unavailable()) is None:
            return FloatWeight(part_sizes, in_features, dtype, is_gated)
        jit.warn_once(problem)
    num_rows = sum(part_sizes)
    if device.type == "cpu" and dtype == torch.float32:
        return column_major(num_rows, in_features, dtype=dtype, device=device)
    return torch.empty(num_rows, in_features, dtype=dtype, device=device)


def weight_parts(weight: Weight, part_sizes: Sequence[int]) -> Sequence[torch.Tensor | WeightPart]:
    """What fills each projection of a weight: a view, or what packs as it is filled."""
    return weight.parts() if isinstance(weight, PackedWeight) else weight.detach().split(list(part_sizes))


def column_major(num_rows: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized matrix [num_rows, num_columns] whose columns lie in one run each."""
    return torch.empty(num_columns, num_rows, dtype=dtype, device=device).t()


def _plain(weight: Weight) -> torch.Tensor:
    return weight.unpacked() if isinstance(weight, PackedWeight) else weight
