"""Stats on the wire: dataclasses of pagewire.stats to messages of the same fields and back, by name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from pagewire.columns import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from pagewire.stats import (
    BlockColumns,
    CoreConnection,
    CoreDetail,
    FrontendStats,
    ProcessStats,
    RequestColumns,
    StepColumns,
    WorkerStats,
)

T = TypeVar("T")
_NESTED: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (ProcessStats, RequestColumns, StepColumns, BlockColumns, CoreConnection)
}


def _types(cls: Any) -> dict[str, str]:
    """The names of the types of a dataclass's fields."""
    return {field.name: str(field.type) for field in fields(cls)}


def fill(message: Any, stats: Any) -> Any:
    """Sets a message's fields from the dataclass's, and returns the message."""
    for name in _types(type(stats)):
        value = getattr(stats, name)
        if isinstance(value, np.ndarray):
            setattr(message, name, pack_uint64(value) if value.dtype == np.uint64 else pack_int32(value))
        elif is_dataclass(value):
            getattr(message, name).SetInParent()
            fill(getattr(message, name), value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, tuple):
            for item in value:
                fill(getattr(message, name).add(), item)
        else:
            setattr(message, name, value)
    return message


def read(cls: type[T], message: Any) -> T:
    """The dataclass of a message. Raises InvalidArgumentError where a column is no column."""
    values: dict[str, Any] = {}
    for name, kind in _types(cls).items():
        value = getattr(message, name)
        if kind == "Int32Column":
            value = unpack_int32(value, name)
        elif kind == "UInt64Column":
            value = unpack_uint64(value, name)
        elif kind in _NESTED:
            value = read(_NESTED[kind], value)
        elif kind == "list[str]":
            value = list(value)
        elif kind.startswith("tuple["):
            inner = _NESTED[kind.removeprefix("tuple[").partition(",")[0]]
            value = tuple(read(inner, item) for item in value)
        values[name] = value
    return cls(**values)


__all__ = ["CoreDetail", "FrontendStats", "WorkerStats", "fill", "read"]
