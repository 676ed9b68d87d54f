"""Rotary positions and the KV write on a CPU, in one call: queries and keys are normed and turned where they lie, then
keys and values go to their slots. Without tables it only writes."""

from __future__ import annotations

import numba
import torch

from kernels.cpu import jit
from kernels.cpu.caches import caches
from kernels.cpu.call import SharedCall
from kernels.cpu.lanes import (
    KINDS,
    item_bytes,
    load,
    merge_halves,
    scratch_memory,
    store,
)
from kernels.cpu.norm import inverse_root_mean_square, scale_row
from kernels.cpu.vectors import (
    FLOAT32,
    fma,
    get_float32,
    get_int32,
    get_int64,
    get_uint16,
    put_int32,
    put_uint16,
    splat,
)

(
    _QUERY,
    _TOKEN_BYTES,
    _NUM_HEADS,
    _NUM_KV_HEADS,
    _HEAD_SIZE,
    _VALUE_SIZE,
    _KIND,
    _POSITIONS,
    _COS,
    _SIN,
    _HALF,
    _QUERY_NORM,
    _KEY_NORM,
    _KEY,
    _KEY_TOKEN_BYTES,
    _KEY_HEAD_BYTES,
    _VALUE,
    _VALUE_TOKEN_BYTES,
    _VALUE_HEAD_BYTES,
    _KEY_CACHE,
    _VALUE_CACHE,
    _BLOCK_SIZE,
    _CACHE_KIND,
    _SLOTS,
    _NUM_TOKENS,
    _TOKENS_PER_CHUNK,
    _EPS,
) = range(0, 8 * 27, 8)
_CHUNK_ELEMENTS = 1 << 13
_MANY_TOKENS, _BLOCK_TOKENS = 128, 32
"""From so many tokens on a chunk has whole blocks: the keys of a block's tokens lie in the same cache lines, and two
threads that write to them take each other's. 1,024 tokens of SmolLM2-135M by two threads: 0.30 ms, 0.15 with it."""
_MOST_SIZE = 1024
_SCRATCH_BYTES = 4 * _MOST_SIZE
_f32 = numba.float32
_NO_VALUE, _VALUE_ALONE, _VALUE_AND_NEXT = 0, 1, 2


@jit.inlined
def _turn(x: int, kind: int, cos: int, sin: int, half: int) -> None:
    """Turns one head in place."""
    width = item_bytes(kind)
    for i in range(0, half, 16):
        left = half - i
        a_at, b_at = x + i * width, x + (half + i) * width
        a, b = load(kind, a_at, left), load(kind, b_at, left)
        c, s = load(FLOAT32, cos + i * 4, left), load(FLOAT32, sin + i * 4, left)
        store(kind, a_at, fma(splat(_f32(0)) - b, s, a * c), left)
        store(kind, b_at, fma(a, s, b * c), left)


@jit.inlined
def _turn_token(args: int, token: int) -> None:
    """Norms and turns the heads of query and key of one token."""
    kind, size, half = get_int64(args + _KIND), get_int64(args + _HEAD_SIZE), get_int64(args + _HALF)
    num_heads = get_int64(args + _NUM_HEADS)
    position = get_int64(get_int64(args + _POSITIONS) + token * 8)
    cos, sin = get_int64(args + _COS) + position * half * 4, get_int64(args + _SIN) + position * half * 4
    head_at = get_int64(args + _QUERY) + token * get_int64(args + _TOKEN_BYTES)
    for head in range(num_heads + get_int64(args + _NUM_KV_HEADS)):
        weight = get_int64(args + (_QUERY_NORM if head < num_heads else _KEY_NORM))
        if weight != 0:
            inverse = inverse_root_mean_square(head_at, kind, size, get_float32(args + _EPS))
            scale_row(head_at, weight, head_at, kind, size, inverse)
        _turn(head_at, kind, cos, sin, half)
        head_at += size * item_bytes(kind)


@jit.inlined
def _converted(source: int, size: int, kind: int, cache_kind: int, scratch: int) -> int:
    """The address of numbers in the cache's type."""
    if kind == cache_kind:
        return source
    for i in range(0, size, 16):
        numbers = load(kind, source + i * item_bytes(kind), size - i)
        store(cache_kind, scratch + i * item_bytes(cache_kind), numbers, size - i)
    return scratch


@jit.inlined
def _write_key(source: int, dest: int, size: int, block_size: int, kind: int) -> None:
    """One key into its block: its words lie block_size words apart."""
    pack = 4 // item_bytes(kind)
    for word in range(size // pack):
        put_int32(dest + word * block_size * 4, get_int32(source + word * 4))
    if size % pack != 0:
        put_int32(dest + size // pack * block_size * 4, numba.int32(get_uint16(source + (size - 1) * 2)))


@jit.inlined
def _write_value(source: int, dest: int, size: int, kind: int, half: int) -> None:
    """One value into its line, which for 16-bit types it shares with a neighbour: half 0 or 1 of each word."""
    if kind == FLOAT32:
        for i in range(0, size, 16):
            store(kind, dest + i * 4, load(kind, source + i * 4, size - i), size - i)
        return
    for i in range(size):
        put_uint16(dest + i * 4 + half * 2, get_uint16(source + i * 2))


@jit.inlined
def _write_token(args: int, token: int, slot: int, what: int, scratch: int) -> None:
    """Keys of one token, and no value, its values, or its and the next token's, which go to the same lines."""
    kind, cache_kind = get_int64(args + _KIND), get_int64(args + _CACHE_KIND)
    size, value_size = get_int64(args + _HEAD_SIZE), get_int64(args + _VALUE_SIZE)
    block_size, heads = get_int64(args + _BLOCK_SIZE), get_int64(args + _NUM_KV_HEADS)
    pack = 4 // item_bytes(cache_kind)
    key_words, value_words = -(-size // pack) * block_size, -(-block_size // pack) * value_size
    block, offset = slot // block_size, slot % block_size
    key = get_int64(args + _KEY) + token * get_int64(args + _KEY_TOKEN_BYTES)
    value = get_int64(args + _VALUE) + token * get_int64(args + _VALUE_TOKEN_BYTES)
    key_dest = get_int64(args + _KEY_CACHE) + (block * heads * key_words + offset) * 4
    value_dest = get_int64(args + _VALUE_CACHE) + (block * heads * value_words + offset // pack * value_size) * 4
    for head in range(heads):
        source = _converted(key + head * get_int64(args + _KEY_HEAD_BYTES), size, kind, cache_kind, scratch)
        _write_key(source, key_dest + head * key_words * 4, size, block_size, cache_kind)
        source, dest = value + head * get_int64(args + _VALUE_HEAD_BYTES), value_dest + head * value_words * 4
        if what == _VALUE_AND_NEXT:
            merge_halves(source, source + get_int64(args + _VALUE_TOKEN_BYTES), dest, value_size // 16)
        elif what == _VALUE_ALONE:
            source = _converted(source, value_size, kind, cache_kind, scratch)
            _write_value(source, dest, value_size, cache_kind, offset % pack)


def _rotate_and_write(args: int, chunk: int) -> None:
    """Tokens of one chunk."""
    count, scratch = get_int64(args + _TOKENS_PER_CHUNK), scratch_memory(_SCRATCH_BYTES)
    end = min((chunk + 1) * count, get_int64(args + _NUM_TOKENS))
    if get_int64(args + _COS) != 0:
        for token in range(chunk * count, end):
            _turn_token(args, token)
    kind = get_int64(args + _CACHE_KIND)
    may_pair = kind != FLOAT32 and kind == get_int64(args + _KIND) and get_int64(args + _VALUE_SIZE) % 16 == 0
    block_size, slots = get_int64(args + _BLOCK_SIZE), get_int64(args + _SLOTS)
    is_paired = False
    for token in range(chunk * count, end):
        slot = get_int64(slots + token * 8)
        if slot < 0:
            is_paired = False
            continue
        if is_paired:  # its values went with those of the token before
            is_paired = False
            _write_token(args, token, slot, _NO_VALUE, scratch)
            continue
        is_paired = may_pair and slot % block_size % 2 == 0 and slot % block_size + 1 < block_size and token + 1 < end
        is_paired = is_paired and get_int64(slots + token * 8 + 8) == slot + 1
        _write_token(args, token, slot, _VALUE_AND_NEXT if is_paired else _VALUE_ALONE, scratch)


_rotate = SharedCall(jit.chunks(_rotate_and_write), 26, 1)


def can_write(key: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether the caches lie as on a CPU, in types that are known here."""
    described = caches(key_cache, value_cache)
    return (
        described is not None
        and key.dtype in KINDS
        and max(described.most_head_size, described.value_size) <= _MOST_SIZE
    )


def rotate_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_size: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """See `kernels.rotary_write.reference`."""
    described = caches(key_cache, value_cache)
    assert described is not None
    num_kv_heads, value_size = described.num_kv_heads, described.value_size
    num_tokens, width = qkv.shape
    num_heads = (width - num_kv_heads * value_size) // head_size - num_kv_heads
    item, address, cos = qkv.element_size(), qkv.data_ptr(), tables[0]
    token_stride = qkv.stride(0)
    token_bytes = token_stride * item
    key = address + num_heads * head_size * item
    _run(
        num_tokens,
        width,
        address,
        token_bytes,
        num_heads,
        num_kv_heads,
        head_size,
        value_size,
        KINDS[qkv.dtype],
        positions.data_ptr(),
        cos.data_ptr(),
        tables[1].data_ptr(),
        cos.shape[1],
        0 if norms is None else norms[0].data_ptr(),
        0 if norms is None else norms[1].data_ptr(),
        key,
        token_bytes,
        head_size * item,
        key + num_kv_heads * head_size * item,
        token_bytes,
        value_size * item,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        described.block_size,
        described.kind,
        slot_mapping.data_ptr(),
        num_tokens,
        eps=eps,
    )
    return qkv.as_strided((num_tokens, num_heads, head_size), (token_stride, head_size, 1))


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.kv_write.reference`."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    num_tokens, num_kv_heads, head_size = key.shape
    item = key.element_size()
    value = value.to(key.dtype)
    strides = [stride * item for x in (key, value) for stride in x.stride()[:2]]
    _run(
        num_tokens,
        2 * num_kv_heads * head_size,
        0,
        0,
        0,
        num_kv_heads,
        head_size,
        value.shape[2],
        KINDS[key.dtype],
        *(0,) * 6,
        key.data_ptr(),
        strides[0],
        strides[1],
        value.data_ptr(),
        strides[2],
        strides[3],
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        key_cache.shape[3],
        KINDS[key_cache.dtype],
        slot_mapping.data_ptr(),
        num_tokens,
        eps=0.0,
    )


def _run(num_tokens: int, token_elements: int, *words: int, eps: float) -> None:
    per_chunk = max(2, _CHUNK_ELEMENTS // token_elements)
    if num_tokens >= _MANY_TOKENS:
        per_chunk = -(-per_chunk // _BLOCK_TOKENS) * _BLOCK_TOKENS
    _rotate(-(-num_tokens // per_chunk), *words, per_chunk, eps)
