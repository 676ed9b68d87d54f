"""How long torch's OpenMP threads spin at a barrier before they sleep; to be set before torch is imported."""

from __future__ import annotations

import os

SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPIN_COUNT = "10000"
"""GNU OpenMP spins for milliseconds by default. Where a core is taken by another process (the core, the frontend, a
neighbour), the thread that is waited for does not run meanwhile, and a step takes many times as long. Measured on two
cores with SmolLM2 in bfloat16, one stream: on a quiet machine 11.0 tokens/s by default, 11.6 with 10000, 9.3 with 1000,
7.2 with 100; under a load of 6 to 10 about 2 s per token by default and 0.44 s with 10000.
"""


def bound_spinning() -> None:
    """Sets the bound unless the user has chosen how threads wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)
