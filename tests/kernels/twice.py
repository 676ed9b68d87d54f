"""A kernel that tests compile in several processes at once."""

from __future__ import annotations

from kernels.cpu import jit


@jit.inlined
def twice(x):  # type: ignore[no-untyped-def]
    """x + x."""
    return x + x
