"""Who records a program (see program.py), and memory for what kernels write. Needs no compiler."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.cpu.program import Recording


class _Recorder(threading.local):
    recording: Recording | None = None


recorder = _Recorder()
"""Has the program that this thread records, if any."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor for a kernel to write to; of the program's memory while one is recorded."""
    if (recording := recorder.recording) is not None:
        return recording.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def is_recording() -> bool:
    """Whether this thread records a program: what looks at tensors now would not when it runs again."""
    return recorder.recording is not None
