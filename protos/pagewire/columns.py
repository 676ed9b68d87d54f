"""Packed columns: numpy arrays to little-endian bytes and back, without a copy where the machine allows it.

A packed int32 column costs about a thirtieth of a `repeated int32` in Python's protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pagewire.errors import InvalidArgumentError, violation

Int32Column = npt.NDArray[np.int32]
UInt64Column = npt.NDArray[np.uint64]
Float32Column = npt.NDArray[np.float32]

EMPTY_INT32: Int32Column = np.empty(0, np.int32)


def int32(values: Iterable[int]) -> Int32Column:
    """An int32 column from any iterable of ints."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype=np.int32)
    return np.fromiter(values, np.int32)


def pack_int32(values: Iterable[int]) -> bytes:
    """Little-endian int32 bytes of the values."""
    return int32(values).astype("<i4", copy=False).tobytes()


def pack_uint64(values: Iterable[int]) -> bytes:
    """Little-endian uint64 bytes of the values."""
    column = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    return column.astype("<u8", copy=False).tobytes()


def pack_float32(values: Float32Column) -> bytes:
    """Little-endian float32 bytes of the values."""
    return np.ascontiguousarray(values).astype("<f4", copy=False).tobytes()


def _unpack(data: bytes, dtype: str, width: int, field: str) -> npt.NDArray[np.generic]:
    if len(data) % width:
        raise InvalidArgumentError([violation(field, f"{len(data)} bytes", f"must be a multiple of {width} bytes")])
    return np.frombuffer(data, dtype=dtype)


def unpack_int32(data: bytes, field: str = "column") -> Int32Column:
    """A read-only view of int32 bytes. Raises InvalidArgumentError where the length is no multiple of 4."""
    return _unpack(data, "<i4", 4, field).view(np.int32)


def unpack_uint64(data: bytes, field: str = "column") -> UInt64Column:
    """A read-only view of uint64 bytes. Raises InvalidArgumentError where the length is no multiple of 8."""
    return _unpack(data, "<u8", 8, field).view(np.uint64)


def unpack_float32(data: bytes, field: str = "column") -> Float32Column:
    """A read-only view of float32 bytes. Raises InvalidArgumentError where the length is no multiple of 4."""
    return _unpack(data, "<f4", 4, field).view(np.float32)
