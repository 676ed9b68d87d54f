"""Calls of compiled kernels from Python: made at once and, while a program is recorded (see program.py), noted too.

A call is a function void(args_address, unused) and a block of words. Everything that a kernel does goes through here;
what it writes to comes from `recorder.empty`, so that a program's memory is the same when it runs again.
"""

from __future__ import annotations

import struct
import threading

import torch

from kernels.cpu import jit
from kernels.cpu.atomics import call_at
from kernels.cpu.recorder import recorder
from kernels.cpu.team import share, team
from kernels.cpu.vectors import get_int64

_HEAD_BYTES = 24


@jit.inlined
def _invoke(function: int, args: int) -> None:
    call_at(function, args, 0)


class Call(threading.local):
    """One kernel's calls: packs int64 words and, behind them, float32 numbers into memory of the calling thread."""

    def __init__(self, function: jit.Chunks, num_words: int, num_floats: int = 0) -> None:
        layout = struct.Struct(f"<{num_words}q" + "f4x" * num_floats)
        self._function, self._pack, self._block = function, layout.pack_into, bytearray(layout.size)
        self._address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()

    def __call__(self, *values: float) -> None:
        """Runs the kernel with these arguments."""
        self._pack(self._block, 0, *values)
        address = self._function.address
        if (recording := recorder.recording) is not None:
            recording.note(address, self._block)
        _invoke(address, self._address)


@jit.chunks
def _share_call(args, unused):  # type: ignore[no-untyped-def]
    share(get_int64(args), get_int64(args + 8), args + _HEAD_BYTES, get_int64(args + 16))


class SharedCall(Call):
    """Calls of a kernel whose chunks the team shares."""

    def __init__(self, chunk: jit.Chunks, num_words: int, num_floats: int = 0) -> None:
        super().__init__(_share_call, _HEAD_BYTES // 8 + num_words, num_floats)
        self._chunk = chunk

    def __call__(self, num_chunks: int, *values: float) -> None:  # type: ignore[override]
        """Runs the chunks with these arguments."""
        super().__call__(team().state, self._chunk.address, num_chunks, *values)
