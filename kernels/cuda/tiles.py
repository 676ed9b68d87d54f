"""How paged attention cuts a batch up: a pure function of sizes, types, the GPU's capability and the batch's shape.

No tile depends on a tensor's contents, so that a launch can be captured in a CUDA graph and is the same on replay.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

MIN_ROWS = 16
"""Rows of a tensor core's product; a decode's group of heads is padded to it."""
MOST_DECODE_ROWS = 64
"""Above it a uniform batch of few tokens per row is bound by arithmetic, and takes the tiles of a prefill."""
MOST_SEGMENTS = 64
"""The reduce kernel holds all segments of a head at once."""
MIN_SEGMENT_KEYS = 128
"""Below it a segment's result costs about what its keys do."""
DECODE_PROGRAMS_PER_SM = 4
"""Two fit beside each other; twice that evens out rows of different lengths and a last, partly filled round."""
_SHARED_BYTES = {80: 160 << 10, 87: 160 << 10, 90: 224 << 10, 100: 224 << 10, 103: 224 << 10}
_LEAST_SHARED_BYTES = 96 << 10
"""What a program may have: large on a data center's GPU, about 99 KiB on all the others."""


@dataclass(frozen=True)
class Device:
    """What tiles depend on of a GPU."""

    capability: int
    """Such as 90."""
    num_sms: int


@dataclass(frozen=True)
class Shape:
    """What tiles depend on of a model's layer."""

    head_size: int
    value_size: int
    groups: int
    """Query heads of a KV head."""
    compute_bytes: int
    """Of a number in the products: 4 is float32, without tensor cores."""
    cache_bytes: int
    """Of a number in the caches."""


@dataclass(frozen=True)
class Tiles:
    """A launch's constants."""

    rows: int
    """Of a product: (query token, head in group) pairs, of `queries` tokens."""
    queries: int
    keys: int
    """Read at once; independent of the page size."""
    segments: int
    """Programs that share a row's keys, a power of two; their results are reduced."""
    num_warps: int
    num_stages: int


@functools.cache
def device_of(device: torch.device) -> Device:
    """Of a tensor's device; a CPU, where the interpreter runs, counts as one H200."""
    if device.type != "cuda":
        return Device(90, 132)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count)


@functools.lru_cache(4096)
def tiles(shape: Shape, device: Device, num_tokens: int, num_rows: int, num_kv_heads: int, max_keys: int) -> Tiles:
    """For a batch of num_rows sequences with num_tokens query tokens; max_keys is what the block tables could hold.

    A batch with the same few tokens in every row (a decode, a draft verification) is bound by the reading of keys:
    the fewest rows that hold a sequence's tokens, and many programs. Any other batch has a prefill in it.
    """
    num_rows = max(1, num_rows)
    per_row = max(1, -(-num_tokens // num_rows))
    is_uniform = per_row * num_rows == num_tokens
    rows = _power_of_two(max(MIN_ROWS, shape.groups * per_row))
    if is_uniform and rows <= MOST_DECODE_ROWS:
        keys, num_warps = _decode_keys(shape), 4
        programs_wanted = DECODE_PROGRAMS_PER_SM * device.num_sms
    else:
        rows, keys, num_warps = _prefill(shape, device.capability, shape.groups * per_row)
        programs_wanted = device.num_sms  # results of segments cost more here: only to have work for every SM
    queries = max(1, rows // shape.groups)
    num_programs = num_rows * -(-per_row // queries) * num_kv_heads
    segments = _segments(num_programs, programs_wanted, max_keys)
    return Tiles(rows, queries, keys, segments, num_warps, _stages(shape, device.capability, rows, keys))


def _power_of_two(x: int) -> int:
    return int(triton.next_power_of_2(x))


def _widest(shape: Shape) -> int:
    return _power_of_two(max(shape.head_size, shape.value_size))


def _decode_keys(shape: Shape) -> int:
    """32 KiB of keys and values in 16 bits for heads of 128: with the stages' copies enough bytes are under way."""
    if shape.compute_bytes == 4:
        return 32  # products in ordinary arithmetic keep whole operands in registers
    if shape.cache_bytes < shape.compute_bytes and _widest(shape) <= 64:
        return 64  # what is converted passes through registers
    return {16: 128, 32: 128, 64: 128, 128: 64}.get(_widest(shape), 32)


def _prefill(shape: Shape, capability: int, rows_per_sequence: int) -> tuple[int, int, int]:
    """Rows, keys and warps; 128 rows of 8 warps leave the scores, the sums and the result room in registers.

    Batches that are mostly decodes take half the rows: the others would be padding. Wide heads do so too where the
    queries alone would take most of the shared memory, or the products' operands the registers.
    """
    widest = _widest(shape)
    least = _power_of_two(max(MIN_ROWS, shape.groups))
    if shape.compute_bytes == 4:
        return max(least, 32 if widest <= 64 else 16), 32, 4
    is_large = widest > 128 and (capability < 90 or capability not in _SHARED_BYTES)
    rows = max(64 if is_large or rows_per_sequence < 128 else 128, least)
    num_warps = 8 if rows >= 128 or widest > 128 else 4
    # Before Hopper a product's operands lie in registers, where four warps, or a conversion, leave no room for more.
    is_tight = capability < 90 and widest > 64 and (num_warps == 4 or shape.cache_bytes < shape.compute_bytes)
    return rows, 32 if widest > 128 or is_tight else 64, num_warps


def _stages(shape: Shape, capability: int, rows: int, keys: int) -> int:
    """Five where shared memory has room: one tile of keys and values is then read while another is worked on.

    A tile's addresses come from a load of their own, of the block table. With so few as three stages the pipeline
    spends them on that: a tile's copy begins only after the work on the one before it.
    """
    widest, room = _widest(shape), _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)
    tile = 2 * keys * widest * shape.cache_bytes
    # Values of another type lie in shared memory once more, in the type of the products.
    converted = 0 if shape.cache_bytes == shape.compute_bytes else 2 * keys * widest * shape.compute_bytes
    fixed = rows * (widest + keys) * shape.compute_bytes + converted
    # Hopper's products of 64 rows run while the next begins, and keep their tile for longer.
    if capability >= 90 and rows >= 64:
        fixed += tile
    # In float32 both operands are in registers as well, and a second tile under way spills.
    return 5 if shape.compute_bytes < 4 and fixed + 2 * tile <= room else 3 if fixed + tile <= room else 1


def _segments(num_programs: int, programs_wanted: int, max_keys: int) -> int:
    """A power of two, so that few kernels are compiled: as many as give the wanted programs, where keys suffice."""
    most = min(MOST_SEGMENTS, max_keys // MIN_SEGMENT_KEYS)
    if most < 2 or num_programs >= programs_wanted:
        return 1
    wanted = _power_of_two(-(-programs_wanted // max(1, num_programs)))
    return min(wanted, 1 << (most.bit_length() - 1))
