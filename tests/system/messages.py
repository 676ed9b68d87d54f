"""Arbitrary protobuf messages of a type, made by hypothesis from its descriptor."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 4
_EDGES_32 = [0, 1, 2, 15, 16, 127, 2**16, 2**31 - 1]

_INTEGERS = {
    FieldDescriptor.TYPE_INT32: st.sampled_from([*_EDGES_32, -1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: st.sampled_from([*_EDGES_32, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: st.sampled_from([*_EDGES_32, -1, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([*_EDGES_32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
}
_TEXT = st.sampled_from(["", "smollm2", "a", "\x00", "🌍", "x" * 300]) | st.text(max_size=20)
# Columns: lengths that are multiples of 4 and 8, and such that are not.
_BYTES = st.binary(max_size=24) | st.sampled_from([bytes(4), bytes(8), b"\xff" * 8, b"\x01\x00\x00\x00" * 40])


def _scalar(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type in _INTEGERS:
        return _INTEGERS[field.type]
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return st.sampled_from([0.0, 0.5, 1.0, -1.0]) | st.floats(width=32)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return _TEXT
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _BYTES
    if field.type == FieldDescriptor.TYPE_ENUM:
        # Numbers that are not in the enum too: an open enum lets them through.
        return st.sampled_from([value.number for value in field.enum_type.values] + [99, -1])
    return messages(field.message_type, depth - 1)


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    entry = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return st.dictionaries(_scalar(key, depth), _scalar(value, depth), max_size=3)
    return st.lists(_scalar(field, depth), max_size=4) if field.is_repeated else _scalar(field, depth)


def messages(descriptor: Descriptor, depth: int = MAX_DEPTH) -> st.SearchStrategy[Any]:
    """Messages of the type, each field set or not, at most one of a oneof."""
    usable = [f for f in descriptor.fields if depth > 0 or f.type != FieldDescriptor.TYPE_MESSAGE]

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        values: dict[str, Any] = {}
        for field in usable:
            oneof = field.containing_oneof
            is_taken = oneof is not None and any(f.name in values for f in oneof.fields)
            if not is_taken and draw(st.booleans()):
                values[field.name] = draw(_value(field, depth))
        return GetMessageClass(descriptor)(**values)

    return build()
