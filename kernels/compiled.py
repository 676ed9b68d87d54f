"""Finds the compiled form of an operation's CPU implementation, where this machine can compile."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kernels.cpu import jit


@functools.cache
def compiled(name: str) -> Any | None:
    """The module kernels.cpu.<name>, imported at the first call; None, said loudly once, where torch must serve."""
    if (problem := jit.unavailable()) is not None:
        jit.warn_once(problem)
        return None
    return importlib.import_module(f"kernels.cpu.{name}")
