"""Arguments of a kernel's call: words in memory that each calling thread keeps."""

from __future__ import annotations

import struct
import threading

import torch


class Arguments(threading.local):
    """A block of int64 words with float32 numbers after them, as `struct` packs it."""

    def __init__(self, num_words: int, num_floats: int = 0) -> None:
        layout = struct.Struct(f"<{num_words}q" + "f4x" * num_floats)
        self._pack, self._block = layout.pack_into, bytearray(layout.size)
        self.address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()

    def fill(self, *values: float) -> int:
        """Writes the words and floats; returns their address."""
        self._pack(self._block, 0, *values)
        return self.address
