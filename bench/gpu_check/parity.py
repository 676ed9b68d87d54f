"""Every operation that has a CUDA implementation against its reference, on fresh random inputs."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import kernels
from bench.gpu_check.attention_cases import CASES, DRY_CASES, FP8, dense_attention, paged_case
from bench.gpu_check.report import Row
from bench.gpu_check.setting import Setting
from kernels.dispatch import CHOICE_VARIABLE
from kernels.packed_weight import PackedWeight
from kernels.table import OPERATIONS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
from kernel_cases import CALLS, Call

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
"""Largest root mean square error, as a part of the reference's root mean square."""
NUM_PROCESSES = 8
WITH_KERNELS = [name for name, operation in OPERATIONS.items() if "cuda" in operation.implementations]


@contextmanager
def cuda_layout() -> Iterator[None]:
    """Cases are made on the CPU: caches in the layout that CUDA's have."""
    before = os.environ.get(CHOICE_VARIABLE)
    os.environ[CHOICE_VARIABLE] = "interpreter"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CHOICE_VARIABLE]
        else:
            os.environ[CHOICE_VARIABLE] = before


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in whatever holds them, copied."""
    if isinstance(value, PackedWeight):
        return value.unpacked().to(device, copy=True)  # packed for a CPU
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    return copy.deepcopy(value)


def outcome(function: Callable[..., Any], call: Call, device: torch.device) -> list[torch.Tensor]:
    """What a call returns and what it changed, on the CPU."""
    args = [to_device(arg, device) for arg in call.args]
    kwargs = {name: to_device(value, device) for name, value in call.kwargs.items()}
    returned = function(*args, **kwargs)
    found = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return [tensor.cpu() for tensor in (*found, *(args[i] for i in call.changed))]


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """See MAX_ERROR; infinite where type, shape or the places of NaN differ."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return float("inf")
    a, b = got.double(), expected.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    if not b.numel():
        return 0.0
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-12))


def check_operation(setting: Setting, name: str, dtype: torch.dtype) -> Row:
    """The largest error of an operation over the tests' calls."""
    operation, worst, count = OPERATIONS[name], 0.0, 0
    with cuda_layout():
        calls = list(CALLS[name](setting.generator(), dtype))
    for call in calls[: 3 if setting.is_dry else None]:
        expected = outcome(operation.reference, call, torch.device("cpu"))
        got = outcome(operation.implementations["cuda"], call, setting.device)
        worst = max([worst, *(error_of(a, b) for a, b in zip(got, expected, strict=True))])
        count += 1
    return _row(name, dtype, "", count, worst, MAX_ERROR[dtype])


def check_attention(setting: Setting, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[Row]:
    """Attention of real sizes against products and sums in float64; caches in 8 bits too."""
    rows = []
    for case in DRY_CASES if setting.is_dry else CASES:
        kv = paged_case(setting, case, dtype, cache_dtype)
        arguments = (kv.query, *kv.caches, kv.query_start_loc, kv.seq_lens, kv.block_tables, kv.scale)
        got = kernels.paged_attention(*arguments, **kv.options, out=kv.out)
        worst = error_of(got.double(), dense_attention(kv))
        what = f"{case} KV {_name(cache_dtype)}"
        rows.append(_row("paged_attention", dtype, what, 1, worst, MAX_ERROR[dtype]))
    return rows


def check_write_8_bit(setting: Setting, dtype: torch.dtype) -> list[Row]:
    """The KV write into 8-bit caches, bit by bit; numbers within the range of 8 bits."""
    keys, values = (setting.randn(40, 8, 128, dtype=torch.float32).to(dtype) for _ in range(2))
    slots = torch.randperm(64)[:40].to(setting.device)
    caches = [torch.zeros(4, 16, 8, 128, dtype=FP8, device=setting.device) for _ in range(2)]
    kernels.write_kv(keys, values, *caches, slots)
    wrong = 0
    for cache, new in zip(caches, (keys, values), strict=True):
        expected = torch.zeros(64, 8, 128, dtype=torch.uint8, device=setting.device)
        expected[slots] = new.to(FP8).view(torch.uint8)
        wrong += int((cache.view(torch.uint8).flatten(0, 1) != expected).sum())
    return [_row("write_kv", dtype, "into 8-bit caches, numbers that differ", 1, float(wrong), 0.0)]


Task = tuple[str, torch.dtype, torch.dtype | None]
"""An operation on the tests' calls; with a cache's type: on larger inputs."""


def tasks(is_dry: bool) -> list[Task]:
    """What is checked, the longest first."""
    floats = [torch.float32, torch.float16, *([] if is_dry else [torch.bfloat16])]
    found: list[Task] = [("paged_attention", dtype, dtype) for dtype in floats]
    # The interpreter multiplies the raw bits of 8-bit numbers.
    eight_bit = [] if is_dry else [torch.float16, torch.bfloat16]
    found += [(name, dtype, FP8) for name in ("paged_attention", "write_kv") for dtype in eight_bit]
    return found + [(name, dtype, None) for name in WITH_KERNELS for dtype in floats]


def check(setting: Setting, task: Task) -> list[Row]:
    """The rows of a task; what raises is a row that is not ok."""
    name, dtype, cache_dtype = task
    torch.manual_seed(setting.seed)
    torch.set_num_threads(1)
    try:
        if cache_dtype is None:
            return [check_operation(setting, name, dtype)]
        return check_write_8_bit(setting, dtype) if name == "write_kv" else check_attention(setting, dtype, cache_dtype)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return [_row(name, dtype, text, 0, float("inf"), 0.0)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(name: str, dtype: torch.dtype, what: str, count: int, error: float, limit: float) -> Row:
    return {
        "operation": name,
        "dtype": _name(dtype),
        "what": what or "the tests' calls",
        "calls": count,
        "error": error,
        "limit": limit,
        "ok": "yes" if error <= limit else "NO",
    }


def run(setting: Setting) -> list[Row]:
    """All of it, in several processes: most of the time goes into compiling kernels and into the references.

    What is not there when the section's time is over is a row that is not ok.
    """
    every, rows = tasks(setting.is_dry), list[Row]()
    setting = dataclasses.replace(setting, _flush=None)
    pool = ProcessPoolExecutor(1 if setting.is_dry else NUM_PROCESSES, multiprocessing.get_context("spawn"))
    futures = {pool.submit(check, setting, task): task for task in every}
    wait(futures, timeout=max(setting.seconds_left(), 1.0))
    for future, task in futures.items():
        if future.done() and (error := future.exception()) is None:
            rows += future.result()
        else:
            text = f"{type(error).__name__}: {error}" if future.done() else "not done in time"
            rows.append(_row(task[0], task[1], text, 0, float("inf"), 0.0))
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()  # a kernel that hangs
    for process in processes:
        process.join(5)  # their memory and their kernels are gone before anything is measured
        if process.is_alive():
            process.kill()
    return rows
