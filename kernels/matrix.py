"""linear: a matrix product whose rows do not depend on how many rows there are.

In float32 on a CPU the library picks another order of summation for a single row, and for fewer than 16 rows where the
weight lies row by row. Weights that lie column by column (`column_major`) and at least two rows always give one order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias.

    x [num_rows, in_features], weight [out_features, in_features] in any memory layout, bias [out_features]. Returns
    [num_rows, out_features] in x's type; sums are float32.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    for i, row in enumerate(x):
        total = (weight.float() * row.float()).sum(dim=1)
        out[i] = (total if bias is None else total + bias.float()).to(x.dtype)
    return out


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference`."""
    if x.shape[0] == 1 and x.dtype == torch.float32 and x.device.type == "cpu":
        return F.linear(x.expand(2, -1), weight, bias)[:1]
    return F.linear(x, weight, bias)


def column_major(num_rows: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized matrix [num_rows, num_columns] whose columns lie in one run each."""
    return torch.empty(num_columns, num_rows, dtype=dtype, device=device).t()
