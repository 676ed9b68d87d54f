"""The weight of a scaled logit: e ** x as a whole number, so that a sum of weights has no order.

Sums of whole numbers below 2 ** 53 are exact in float64. The mass that top-p compares is therefore the same in every
order, on every device and among any rows, and a token at the boundary is kept everywhere or nowhere. The exponential
is a fixed polynomial, because libraries differ in the last bit.
"""

from __future__ import annotations

import math

import torch

UNIT_BITS = 34
"""The likeliest token, x = 0, weighs 2 ** 34: up to 2 ** 19 tokens sum exactly."""
LN2 = math.log(2.0)
LOG2_E = 1.0 / LN2
LOWEST = -30.0
"""Below -24.2 a weight is 0."""
COEFFICIENTS = tuple(1.0 / math.factorial(k) for k in range(10, -1, -1))
"""Of r ** 10 to r ** 0; |r| <= ln 2 / 2 leaves an error of 2e-13."""


def weights(scaled: torch.Tensor) -> torch.Tensor:
    """Weights of scaled logits (at most 0, any shape, float32), whole numbers in float64."""
    x = scaled.to(torch.float64).clamp_(min=LOWEST)
    n = (x * LOG2_E).round_()
    r = x.sub_(n * LN2)
    p = torch.full_like(r, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        p.mul_(r).add_(coefficient)
    powers = torch.tensor([2.0 ** (UNIT_BITS - i) for i in range(45)], dtype=torch.float64, device=r.device)
    return p.mul_(powers[n.neg_().to(torch.int64)]).round_()


def reference_weight(x: float) -> float:
    """The same for one logit in plain Python, for reading."""
    x = max(x, LOWEST)
    n = round(x * LOG2_E)
    r = x - n * LN2
    p = 0.0
    for coefficient in COEFFICIENTS:
        p = p * r + coefficient
    return float(round(p * 2.0 ** (UNIT_BITS + n)))
