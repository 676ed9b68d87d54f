"""Finds the compiled form of an operation's implementation, where this machine can compile."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any

from kernels.cpu import jit

logger = logging.getLogger(__name__)


@functools.cache
def compiled(name: str) -> Any | None:
    """The module kernels.cpu.<name>, imported at the first call; None, said loudly once, where torch must serve."""
    if (problem := jit.unavailable()) is not None:
        jit.warn_once(problem)
        return None
    return importlib.import_module(f"kernels.cpu.{name}")


@functools.cache
def compiled_for_cuda(name: str) -> Any | None:
    """The module kernels.cuda.<name>, imported at the first call; None, said once, where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("triton is not installed: CUDA runs on plain torch (%s), which is slower", name)
        return None
    return importlib.import_module(f"kernels.cuda.{name}")
