"""Host memory that a step's small arrays cross to the device in, all in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_NUM_BUFFERS = 2
_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
_TYPES[np.dtype(np.float64)] = torch.float64

Array = npt.NDArray[Any]


def packed_bytes(sizes: Sequence[int]) -> int:
    """Bytes that arrays of these sizes in bytes take, each of them aligned."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


class Staging:
    """Two pinned buffers that take turns, and their copy on the device.

    A copy from memory that is not pinned would make the host wait for the device. While one buffer is still on its
    way, the next step is packed into the other; `stage` waits only for the copy of the step before the last one. On
    the device one buffer is enough: a copy into it runs after what was queued on the stream before it.
    On a CPU the same happens in ordinary memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(_NUM_BUFFERS)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(_NUM_BUFFERS)]
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._turn = 0

    def stage(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The arrays as tensors on the device, valid until the next call; ValueError where they are too many bytes."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        host, event = self._hosts[self._turn], self._events[self._turn]
        total = packed_bytes([array.nbytes for array in arrays])
        if total > len(host):
            raise ValueError(f"a step's inputs are {total} bytes, the staging buffer holds {len(host)}")
        if event is not None:
            event.synchronize()
        view, start, places = host.numpy(), 0, []
        for array in arrays:
            np.copyto(view[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
            places.append(start)
            start += packed_bytes([array.nbytes])
        self._device[:total].copy_(host[:total], non_blocking=True)
        if event is not None:
            event.record()
        return [
            self._device[place : place + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for place, array in zip(places, arrays, strict=True)
        ]
