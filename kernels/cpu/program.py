"""Programs: the kernel calls of a forward pass, recorded once and run again by one call, as CUDA graphs are on a GPU.

Between two kernels of a layer Python takes longer than some of the kernels. A program is a list of (function, address
of its arguments). Its memory is fixed: it reads its inputs where they lay when it was recorded, and what it writes lies
in an arena that programs share, because only one runs at a time and none needs what another left.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu import jit
from kernels.cpu.atomics import call_at
from kernels.cpu.recorder import recorder
from kernels.cpu.vectors import get_int64

_LEAST_BYTES = 4096


class NotRecordableError(Exception):
    """What ran does work that is no call of a compiled kernel."""


class Arena:
    """Memory for what programs write. A piece is free again when the last tensor in it is gone.

    Pieces are powers of two, so that programs for other numbers of rows find them.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self.num_bytes = 0
        """Bytes taken from the system."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor of one element at least, aligned to a page."""
        count = math.prod(shape)
        num_bytes = max(_LEAST_BYTES, 1 << (count * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(num_bytes, [])
        if not free:
            free.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self.num_bytes += num_bytes
        block = free.pop()
        # The tensor's storage holds the buffer, views of the tensor the storage, and the buffer the block.
        buffer = (ctypes.c_uint8 * num_bytes).from_buffer(block)
        weakref.finalize(buffer, free.append, block)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


class Recording:
    """The calls that are noted so far."""

    def __init__(self, arena: Arena) -> None:
        self.calls: list[tuple[int, bytearray]] = []
        self.arena = arena

    def note(self, function: int, block: bytearray) -> None:
        """A call with these arguments, which are copied."""
        self.calls.append((function, bytearray(block)))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the arena."""
        return self.arena.empty(shape, dtype)


class _Watch(TorchDispatchMode):
    """Refuses operations of torch that compute or allocate, all but views: they would not run again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = {_memory(x) for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)}
        results = result if isinstance(result, (tuple, list)) else [result]
        if func._schema.is_mutable or any(isinstance(x, torch.Tensor) and _memory(x) not in sources for x in results):
            raise NotRecordableError(f"torch computes {func} between the kernels")
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@jit.inlined
def _run(calls: int, num_calls: int) -> None:
    for i in range(num_calls):
        call_at(get_int64(calls + 16 * i), get_int64(calls + 16 * i + 8), 0)


class Program:
    """A forward pass whose result is `output`, in the same memory after each `run`."""

    def __init__(self, recording: Recording, output: torch.Tensor) -> None:
        self._arena = recording.arena
        sizes = [-(-len(block) // 8) * 8 for _, block in recording.calls]
        self._arguments = torch.frombuffer(
            bytearray().join(block.ljust(size, b"\0") for (_, block), size in zip(recording.calls, sizes, strict=True)),
            dtype=torch.uint8,
        )
        address, calls = self._arguments.data_ptr(), []
        for (function, _), size in zip(recording.calls, sizes, strict=True):
            calls.append((function, address))
            address += size
        self._calls = torch.tensor(calls, dtype=torch.int64)
        self.output = output

    @property
    def num_calls(self) -> int:
        """Kernel calls of a run."""
        return len(self._calls)

    def run(self) -> torch.Tensor:
        """Makes all calls; returns `output`."""
        _run(self._calls.data_ptr(), len(self._calls))
        return self.output


def record(arena: Arena, forward: Callable[[], torch.Tensor]) -> Program:
    """Runs a forward pass and notes its calls.

    What it reads from outside must stay where it is as long as the program is used, and what it decides by looking at
    tensors stays as it was. Raises NotRecordableError where torch computes something in between.
    """
    recording = recorder.recording = Recording(arena)
    try:
        with _Watch():
            output = forward()
    finally:
        recorder.recording = None
    return Program(recording, output)
