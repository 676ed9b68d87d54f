"""Hypothesis strategies for any message of the contract, by its descriptor."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_INT32 = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([0, 1, -1, 2**31 - 1])
_UINT32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2, 2**32 - 1])
_UINT64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2, 2**64 - 1])
_FLOAT = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf")])
_BYTES = st.binary(max_size=40) | st.lists(st.integers(0, 60_000), max_size=6).map(
    lambda ids: b"".join(i.to_bytes(4, "little") for i in ids)
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_UINT64: _UINT64,
    FieldDescriptor.TYPE_FLOAT: _FLOAT,
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_STRING: st.text(max_size=20),
    # Open enums: numbers that no build knows travel too.
    FieldDescriptor.TYPE_ENUM: st.integers(0, 12) | st.sampled_from([-1, 2**31 - 1]),
}
_MAX_DEPTH = 4


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with any fields set to anything that its types allow."""
    message: Any = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and depth >= _MAX_DEPTH:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            keys = _SCALARS[field.message_type.fields_by_name["key"].type]
            values = _SCALARS[field.message_type.fields_by_name["value"].type]
            getattr(message, field.name).update(draw(st.dictionaries(keys, values, max_size=3)))
        elif field.is_repeated:
            _fill(message, field, draw(st.lists(_values(field, depth), max_size=3)))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(_values(field, depth)))
        else:
            setattr(message, field.name, draw(_values(field, depth)))
    return message  # type: ignore[no-any-return]


def _fill(message: Any, field: FieldDescriptor, values: list[Any]) -> None:
    getattr(message, field.name).extend(values)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    return _SCALARS[field.type]
