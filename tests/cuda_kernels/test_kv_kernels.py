"""The KV kernels: float8 caches byte by byte, addresses beyond 32 bits, and hosts that never wait for the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_cases import CALLS, randn
from torch.utils._python_dispatch import TorchDispatchMode

import kernels

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCKS, BLOCK_SIZE, HEADS, SIZE = 5, 4, 3, 20


def fp8_cache(generator: torch.Generator, size: int = SIZE) -> torch.Tensor:
    """A cache of random bytes, of which every one that is not written must stay."""
    return torch.randint(256, (BLOCKS, BLOCK_SIZE, HEADS, size), generator=generator, dtype=torch.uint8).view(FP8)


def slots(generator: torch.Generator, num_tokens: int) -> torch.Tensor:
    """Scattered slots, the second token's negative."""
    found = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    found[1] = -1
    return found


def scales(generator: torch.Generator, kind: str) -> dict[str, Any]:
    count = {"no scales": 0, "one scale": 1, "a scale per head": HEADS}[kind]
    names = ("key_scale", "value_scale") if count else ()
    return {name: torch.rand(count, generator=generator) * 0.05 + 0.001 for name in names}


def cuda(name: str) -> Any:
    return kernels.OPERATIONS[name].implementations["cuda"]


def bits(caches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [cache.view(torch.uint8) for cache in caches]


def converted(values: torch.Tensor) -> torch.Tensor:
    """The bytes that write_kv puts into a cache for one token's key [1, 1, size]."""
    caches = [torch.zeros(1, 1, 1, size, dtype=FP8) for size in (values.numel(), 1)]
    value = torch.zeros(1, 1, 1, dtype=values.dtype)
    cuda("write_kv")(values.reshape(1, 1, -1), value, *caches, torch.zeros(1, dtype=torch.int64))
    return caches[0].view(torch.uint8).flatten()


def test_every_half_becomes_the_float8_that_torch_makes_of_it() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    expected = values.float().clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
    assert torch.equal(converted(values), expected)
    assert expected.unique().numel() == 256


def test_floats_beside_ties_become_the_float8_that_torch_makes_of_them() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(x, torch.tensor(end)) for x in (ties, grid) for end in (-1.0, 1000.0)]
    wild = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(1)).int().view(torch.float32)
    values = torch.cat([ties, grid, *near, torch.tensor([448.1, 464.0, 1e30, torch.inf])])
    values = torch.cat([values, -values, wild])
    assert torch.equal(converted(values), values.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["no scales", "one scale", "a scale per head"])
def test_write_kv_in_float8(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = (SIZE, 7)
    new = [randn(generator, 9, HEADS, size, dtype=dtype) * 3 for size in sizes]
    caches = [fp8_cache(generator, size) for size in sizes]
    arguments, where = scales(generator, kind), slots(generator, 9)
    expected, plain, got = copy.deepcopy(caches), copy.deepcopy(caches), caches
    kernels.write_kv.reference(*new, *expected, where, **arguments)
    kernels.write_kv.implementations["cpu"](*new, *plain, where, **arguments)
    cuda("write_kv")(*new, *got, where, **arguments)
    for a, b, c in zip(bits(got), bits(plain), bits(expected), strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("kind", ["no scales", "one scale", "a scale per head"])
def test_rotate_and_write_kv_in_float8(kind: str, has_norms: bool, dtype: torch.dtype) -> None:
    """The bytes of what the operation leaves in qkv: this may differ from the reference by a rounding, they may not."""
    generator = torch.Generator().manual_seed(3)
    qkv = randn(generator, 9, (6 + 2 * HEADS) * SIZE, dtype=dtype) * 2
    angles, positions = torch.rand(30, 8, generator=generator), torch.randint(30, (9,), generator=generator)
    caches, where = [fp8_cache(generator) for _ in range(2)], slots(generator, 9)
    norms = tuple(randn(generator, SIZE, dtype=dtype) for _ in range(2)) if has_norms else None
    arguments, expected = scales(generator, kind), copy.deepcopy(caches)
    cuda("rotate_and_write_kv")(
        qkv, positions, (angles.cos(), angles.sin()), *caches, where, SIZE, norms, 1e-6, **arguments
    )
    key, value = (x.unflatten(1, (HEADS, SIZE)) for x in qkv[:, 6 * SIZE :].split(HEADS * SIZE, dim=1))
    kernels.write_kv.reference(key, value, *expected, where, **arguments)
    for a, b in zip(bits(caches), bits(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "scale", "problem"),
    [
        (torch.float16, torch.ones(1), "no scale"),
        (FP8, torch.ones(HEADS + 1), "of shape"),
        (FP8, torch.ones(1, dtype=torch.float16), "must be float32"),
    ],
)
def test_a_scale_that_a_cache_does_not_take_is_refused(dtype: torch.dtype, scale: torch.Tensor, problem: str) -> None:
    new = [torch.ones(1, HEADS, SIZE) for _ in range(2)]
    caches = [torch.zeros(1, 1, HEADS, SIZE).to(dtype) for _ in range(2)]
    operation = kernels.write_kv
    for function in (operation.reference, *operation.implementations.values()):
        with pytest.raises(ValueError, match=problem):
            function(*new, *caches, torch.zeros(1, dtype=torch.int64), value_scale=scale)


def far_caches() -> list[torch.Tensor]:
    """Caches [2100, 1, 1, 3] of bytes whose last blocks begin beyond 2**31; the memory between is never touched."""
    memory = [torch.empty(2**31 + 2**26, dtype=torch.uint8) for _ in range(2)]
    return [each.as_strided((2100, 1, 1, 3), (2**20 + 1, 3, 3, 1)) for each in memory]


def test_blocks_beyond_32_bits_are_written() -> None:
    caches = [cache.view(FP8) for cache in far_caches()]
    last = len(caches[0]) - 1
    assert last * caches[0].stride(0) > 2**31
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]])
    table = torch.ones(1, 1), torch.zeros(1, 1)
    where = torch.tensor([last])
    cuda("rotate_and_write_kv")(qkv, torch.zeros(1, dtype=torch.int64), table, *caches, where, 3)
    assert [cache[last].flatten().tolist() for cache in caches] == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    cuda("write_kv")(-qkv[:, None, 3:6], -qkv[:, None, 6:], *caches, where)
    assert [cache[last].flatten().tolist() for cache in caches] == [[-4.0, -5.0, -6.0], [-7.0, -8.0, -9.0]]


def test_blocks_beyond_32_bits_are_copied_and_zeroed() -> None:
    caches = far_caches()
    last = len(caches[0]) - 1
    for cache in caches:
        cache[0], cache[last] = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    cuda("copy_blocks")(*caches, torch.tensor([0, last]), torch.tensor([last, 1]))
    assert [cache[i].flatten().tolist() for cache in caches for i in (last, 1)] == [[1, 2, 3], [4, 5, 6]] * 2
    cuda("zero_blocks")(*caches, torch.tensor([last]))
    assert [cache[i].flatten().tolist() for cache in caches for i in (last, 0)] == [[0, 0, 0], [1, 2, 3]] * 2


class _NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
        assert not function.__name__.startswith(waits), f"{function} waits for the device"
        return function(*args, **kwargs or {})


def test_what_waits_is_noticed() -> None:
    with pytest.raises(AssertionError, match="waits for the device"), _NoWaiting():
        bool(torch.ones(1) > 0)


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "rotate_and_write_kv",
        "write_kv",
        "copy_blocks",
        "zero_blocks",
        "silu_and_mul",
        "gelu_and_mul",
        "gelu_tanh_and_mul",
    ],
)
def test_host_code_never_waits_for_the_device(name: str) -> None:
    for call in list(CALLS[name](torch.Generator().manual_seed(4), torch.float32))[:3]:
        args, kwargs = copy.deepcopy((call.args, call.kwargs))
        with _NoWaiting():
            cuda(name)(*args, **kwargs)
