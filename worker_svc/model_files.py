"""Cheap checks that model files on disk are whole, before anything expensive opens them.

A copy that was cut off is the commonest fault of a local model; the checks read headers only, never the weights.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO

from pagewire.errors import InvalidArgumentError, violation

GGUF_MAGIC = b"GGUF"
_GGUF_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_ITEMS = 1 << 20
_MAX_STRING_BYTES = 64 << 20
_MAX_SAFETENSORS_HEADER_BYTES = 100 << 20
# GGUF metadata value types with a fixed width, by type number (GGUF specification, version 3).
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def bad_model(path: Path, problem: str) -> InvalidArgumentError:
    """The error for a model file that cannot be used as it is."""
    return InvalidArgumentError([violation("model", str(path), problem)], reason="BAD_MODEL_FILES")


def check_model_file(path: Path) -> None:
    """Checks a single-file model (GGUF). Raises InvalidArgumentError where it is empty, foreign or truncated."""
    size = path.stat().st_size
    if size == 0:
        raise bad_model(path, "the file is empty; fetch it again")
    if path.suffix != ".gguf":
        raise bad_model(path, "must be a .gguf file or a directory with config.json")
    check_gguf(path)


def check_model_dir(path: Path) -> None:
    """Checks a Hugging Face directory: config.json, and that the weight files it has are whole.

    A directory without weights is fine here: load_format "dummy" needs none. Raises InvalidArgumentError.
    """
    config = path / "config.json"
    if not config.is_file():
        raise bad_model(path, "the directory has no config.json; expected a Hugging Face model directory")
    try:
        is_object = isinstance(json.loads(config.read_text(encoding="utf-8")), dict)
    except ValueError as error:
        raise bad_model(config, f"is not JSON ({error})") from error
    if not is_object:
        raise bad_model(config, "must hold a JSON object")
    for index in path.glob("*.safetensors.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise bad_model(index, f"is no index of shards ({error!r})") from error
        missing = sorted(shard for shard in shards if not (path / shard).is_file())
        if missing:
            raise bad_model(path, f"{len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}")
    for file in sorted(path.glob("*.safetensors")):
        check_safetensors(file)


def check_safetensors(path: Path) -> None:
    """Checks that a safetensors file has all the bytes its header announces. Raises InvalidArgumentError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise bad_model(path, f"has only {size} bytes; fetch it again")
        if prefix == b"version ":
            raise bad_model(path, "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(size - 8, _MAX_SAFETENSORS_HEADER_BYTES):
            raise bad_model(path, f"is truncated or no safetensors file: its header should have {header_bytes} bytes")
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise bad_model(path, f"has an unreadable header ({error!r})") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size < expected:
        raise bad_model(path, f"is truncated: {size} bytes of {expected}; fetch it again")


def check_gguf(path: Path) -> None:
    """Checks magic, version and that every tensor lies within the file. Raises InvalidArgumentError.

    Source: the GGUF specification (ggml), versions 2 and 3.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            end = _gguf_end(file)
        except EOFError as error:
            raise bad_model(path, f"is truncated within its header ({size} bytes); fetch it again") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise bad_model(path, f"is no GGUF file that can be read: {error}") from error
    if size < end:
        raise bad_model(path, f"is truncated: {size} bytes, its tensors end at {end}; fetch it again")


def _gguf_end(file: BinaryIO) -> int:
    """Offset of the byte after the last tensor. Raises EOFError and ValueError."""
    if (magic := _read(file, 4)) != GGUF_MAGIC:
        raise ValueError(f"it starts with {magic!r}, not {GGUF_MAGIC!r}")
    version = _scalar(file, "I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, known are 2 and 3")
    num_tensors, num_items = _scalar(file, "Q"), _scalar(file, "Q")
    if max(num_tensors, num_items) > _MAX_HEADER_ITEMS:
        raise ValueError(f"it announces {num_tensors} tensors and {num_items} metadata items")
    alignment = _GGUF_DEFAULT_ALIGNMENT
    for _ in range(num_items):
        key = _string(file)
        value = _value(file, _scalar(file, "I"))
        if key == b"general.alignment" and isinstance(value, int):
            alignment = value
    if alignment <= 0:
        raise ValueError(f"general.alignment is {alignment}")
    end = 0
    for _ in range(num_tensors):
        _string(file)
        num_dims = _scalar(file, "I")
        if num_dims > 8:
            raise ValueError(f"a tensor has {num_dims} dimensions")
        num_elements = 1
        for _ in range(num_dims):
            num_elements *= _scalar(file, "Q")
        tensor_type = _scalar(file, "I")
        end = max(end, _scalar(file, "Q") + _tensor_bytes(tensor_type, num_elements))
    data_start = -(-file.tell() // alignment) * alignment
    return data_start + end


def _tensor_bytes(tensor_type: int, num_elements: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor_type)]
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor type {tensor_type} is unknown") from error
    return int(-(-num_elements // block_elements) * block_bytes)


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def _scalar(file: BinaryIO, code: str) -> int:
    value = struct.unpack("<" + code, _read(file, struct.calcsize("<" + code)))[0]
    return value if isinstance(value, int) else 0


def _string(file: BinaryIO) -> bytes:
    length = _scalar(file, "Q")
    if length > _MAX_STRING_BYTES:
        raise ValueError(f"a string of {length} bytes")
    return _read(file, length)


def _value(file: BinaryIO, value_type: int) -> object:
    """Reads one metadata value. Arrays of numbers are skipped as a block, strings one by one."""
    if value_type in _GGUF_SCALARS:
        return _scalar(file, _GGUF_SCALARS[value_type])
    if value_type == _GGUF_STRING:
        return _string(file)
    if value_type != _GGUF_ARRAY:
        raise ValueError(f"metadata type {value_type} is unknown")
    element_type, count = _scalar(file, "I"), _scalar(file, "Q")
    if element_type in _GGUF_SCALARS:
        width = struct.calcsize("<" + _GGUF_SCALARS[element_type])
        if count * width > _MAX_STRING_BYTES:
            raise ValueError(f"an array of {count} items")
        _read(file, count * width)
    elif element_type == _GGUF_STRING and count <= 1 << 24:
        for _ in range(count):
            _string(file)
    else:
        raise ValueError(f"an array of {count} items of type {element_type}")
    return None
