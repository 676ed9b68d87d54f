"""The KV pool: how many blocks a memory budget buys, and their tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.kv_layout import cache_shapes
from pagewire.errors import InvalidArgumentError, ResourceExhaustedError, UnimplementedError, violation
from worker_svc.memory import available_bytes, default_kv_budget_bytes
from worker_svc.models.interface import KvCaches, KvCacheSpec

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_DTYPES = DTYPES | {"float8_e4m3": torch.float8_e4m3fn}
"""8 bits: half the memory and the reads, for kernels that convert as they load."""


MAX_BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 1024, 65_536, 1 << 20


def cache_dtype(name: str, device: torch.device) -> torch.dtype:
    """The cache's type of a name; UnimplementedError where the device's kernels don't have it."""
    known = DTYPES if device.type == "cpu" else DEVICE_DTYPES
    if name not in known:
        raise UnimplementedError(f"kv_cache_dtype {name!r} is not served on {device.type}: {', '.join(known)} are")
    return known[name]


def check_sizes(block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raises InvalidArgumentError where one of them is out of its bounds."""
    found = [
        violation(name, value, f"must be in [1, {high}]")
        for name, value, high in (
            ("block_size", block_size, MAX_BLOCK_SIZE),
            ("max_num_seqs", max_num_seqs, MAX_NUM_SEQS),
            ("max_num_batched_tokens", max_num_batched_tokens, MAX_NUM_BATCHED_TOKENS),
        )
        if not 1 <= value <= high
    ]
    if found:
        raise InvalidArgumentError(found)


class CountingKvCaches(KvCaches):  # type: ignore[misc, valid-type]
    """The pool as the model sees it: every layer fetches its own entry, which counts as progress within a step."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self)):
            yield self[i]


@dataclass(slots=True)
class KvPool:
    """An allocated pool."""

    caches: CountingKvCaches
    num_blocks: int
    """The null block 0 too."""
    block_size: int
    bytes_per_block: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def _shapes(
    spec: KvCacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return cache_shapes(num_blocks, block_size, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device)


def allocate_pool(
    specs: list[KvCacheSpec],
    *,
    block_size: int,
    num_blocks: int,
    memory_bytes: int,
    dtype: str,
    device: torch.device,
    most_blocks: int,
) -> KvPool:
    """Allocates a pool of `num_blocks`, or of as many as `memory_bytes` (0: the default budget) buys.

    most_blocks: more than all slots could ever use, not taken from a budget. Raises InvalidArgumentError where the
    budget is below one usable block, ResourceExhaustedError where the memory is not there.
    """
    element_type = cache_dtype(dtype, device)
    bytes_per_block = element_type.itemsize * sum(
        math.prod(shape) for spec in specs for shape in _shapes(spec, 1, block_size, element_type, device)
    )
    if num_blocks == 0:
        budget = memory_bytes or default_kv_budget_bytes(device)
        num_blocks = min(budget // bytes_per_block, most_blocks)
        if num_blocks < 2:
            limit = f"must hold the null block and one more, {2 * bytes_per_block} bytes at block_size {block_size}"
            raise InvalidArgumentError([violation("memory_bytes", budget, limit)])
    elif num_blocks < 2:
        raise InvalidArgumentError([violation("num_blocks", num_blocks, "must be at least 2: block 0 is null")])
    needed, available = num_blocks * bytes_per_block, available_bytes(device)
    if needed > available:
        raise ResourceExhaustedError(
            f"a KV pool of {num_blocks} blocks needs {needed} bytes, {available} are available: "
            "lower num_blocks or the memory budget (--kv-cache-memory)",
            reason="NOT_ENOUGH_MEMORY",
        )
    caches = CountingKvCaches()
    for spec in specs:
        # Zeros, not empty memory: a masked position is multiplied by 0, and 0 * NaN would be NaN.
        key_shape, value_shape = _shapes(spec, num_blocks, block_size, element_type, device)
        key_cache, value_cache = (
            torch.zeros(shape, dtype=element_type, device=device) for shape in (key_shape, value_shape)
        )
        caches.append((key_cache, value_cache))
    pool = KvPool(caches, num_blocks, block_size, bytes_per_block, dtype)
    logger.info(
        "KV pool: %d blocks of %d tokens (%d tokens besides the null block), %.1f MiB in %s on %s",
        num_blocks,
        block_size,
        (num_blocks - 1) * block_size,
        pool.num_bytes / 2**20,
        dtype,
        device,
    )
    return pool
