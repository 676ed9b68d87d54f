"""Compilations as the tests compare them: a kernel, the types of its pointers, and its constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kernels.cuda.variant import Variant

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
Compilation = tuple[str, frozenset[tuple[str, str]], int, int | None]
"""Kernel; pointers, what is None, and constants; warps; stages, None where the launch leaves them to Triton."""


def _constant(kernel: str, name: str, value: Any) -> str:
    if kernel == "paged_attention_kernel" and name == "SEGMENTS":
        value = min(value, 2)  # a number that is divided by; one segment is another program
    return str(getattr(value, "__name__", value))


def of_variant(variant: Variant, has_stages: bool) -> Compilation:
    kernel = variant.kernel.fn.__name__
    found = {(name, _constant(kernel, name, value)) for name, value in variant.constants.items()}
    found |= {(n, kind) for n, kind in variant.types.items() if kind.startswith("*") and n not in variant.constants}
    return kernel, frozenset(found), variant.num_warps, variant.num_stages if has_stages else None


def of_launch(function: InterpretedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Compilation:
    kernel, found = function.fn.__name__, set()
    for name, value in {**dict(zip(function.arg_names, args, strict=False)), **kwargs}.items():
        if isinstance(value, torch.Tensor):
            found.add((name, _TYPES[value.dtype]))
        elif value is None or (name in function.arg_names and name.isupper()):
            found.add((name, _constant(kernel, name, value)))
    return kernel, frozenset(found), kwargs.get("num_warps", 4), kwargs.get("num_stages")


def record(monkeypatch: pytest.MonkeyPatch) -> list[Compilation]:
    """What is launched from now on, instead of running it."""
    found: list[Compilation] = []

    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(of_launch(self, args, kwargs))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found
