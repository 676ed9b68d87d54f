"""Every operation that has a CUDA implementation against its reference, on fresh random inputs."""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kernels
from bench.gpu_check.attention_cases import (
    CASES,
    DRY_CASES,
    FP8,
    SCALES,
    Case,
    dense_attention,
    paged_case,
    random_scales,
)
from bench.gpu_check.report import Row
from bench.gpu_check.setting import DeviceLost, Setting, first_line
from kernels.dispatch import CHOICE_VARIABLE
from kernels.packed_weight import PackedWeight
from kernels.table import OPERATIONS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
from kernel_cases import CALLS, Call

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
"""Largest root mean square error, as a part of the reference's root mean square."""
MAX_TOKEN_ERROR = {torch.float32: 3e-5, torch.float16: 1e-3, torch.bfloat16: 7.5e-3}
"""The same of the worst single token of attention: one wrong row of thousands is nothing in the mean of all. In 16 bits
2.5 times what the rounding of weights and of results alone gives in these cases: 3.8e-4 and 2.9e-3."""
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
    return _finite_or_inf(float(_rms(a - b) / _rms(b).clamp(min=1e-12)))


def token_error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """See MAX_TOKEN_ERROR; [num_tokens, num_heads, size] both."""
    a, b = got.double().flatten(1), expected.double().flatten(1)
    return _finite_or_inf(float((_rms(a - b, 1) / _rms(b, 1).clamp(min=1e-12)).max()))


def _rms(x: torch.Tensor, *dims: int) -> torch.Tensor:
    return x.square().mean(dims or None).sqrt()


def _finite_or_inf(error: float) -> float:
    """Comparisons with what is no number are all false, and `max` may pass it over."""
    return error if math.isfinite(error) else math.inf


def check_operation(setting: Setting, task: Task) -> Row:
    """The largest error of an operation over the tests' calls."""
    operation, worst, count = OPERATIONS[task.name], 0.0, 0
    with cuda_layout():
        calls = list(CALLS[task.name](setting.generator(), task.dtype))
    for call in calls[: 3 if setting.is_dry else None]:
        expected = outcome(operation.reference, call, torch.device("cpu"))
        got = outcome(operation.implementations["cuda"], call, setting.device)
        worst = max([worst, *(error_of(a, b) for a, b in zip(got, expected, strict=True))])
        count += 1
    return _row(task, task.what, count, worst, MAX_ERROR[task.dtype])


def check_attention(setting: Setting, task: Task) -> Row:
    """Attention of real sizes against products and sums in float64; caches in 8 bits too."""
    assert task.cache_dtype is not None
    case = _cases(setting.is_dry)[task.case]
    kv = paged_case(setting, case, task.dtype, task.cache_dtype, task.scales or SCALES[0])
    arguments = (kv.query, *kv.caches, kv.query_start_loc, kv.seq_lens, kv.block_tables, kv.scale)
    got = kernels.paged_attention(*arguments, **kv.options, out=kv.out).double()
    expected = dense_attention(kv)
    row = _row(task, f"{case} {task.what}".rstrip(), 1, error_of(got, expected), MAX_ERROR[task.dtype])
    error, limit = token_error_of(got, expected), MAX_TOKEN_ERROR[task.dtype]
    return row | {
        "token error": error,
        "token limit": limit,
        "ok": "yes" if row["ok"] == "yes" and error <= limit else "NO",
    }


def check_write_8_bit(setting: Setting, task: Task) -> Row:
    """The KV write into 8-bit caches, bit by bit, with numbers beyond their range.

    Where it also turns the heads, the bytes of what it leaves in qkv: that may differ from the reference by a rounding.
    """
    heads, size, device = (2, 16, setting.device) if setting.is_dry else (8, 128, setting.device)
    qkv = setting.randn(40, 4 * heads * size, dtype=torch.float32).to(task.dtype) * 120
    slots = torch.randperm(64)[:40]
    slots[3] = -1
    caches = [torch.zeros(4, 16, heads, size, dtype=FP8, device=device) for _ in range(2)]
    scales = random_scales(setting, task.scales, heads)
    if task.name == "write_kv":
        key, value = (x.unflatten(1, (heads, size)) for x in qkv[:, 2 * heads * size :].split(heads * size, dim=1))
        kernels.write_kv(key, value, *caches, slots.to(device), **scales)
    else:
        angles, positions = torch.rand(50, size // 2, device=device) * 6, torch.randint(50, (40,)).to(device)
        tables = (angles.cos(), angles.sin())
        kernels.rotate_and_write_kv(qkv, positions, tables, *caches, slots.to(device), size, **scales)
        key, value = (x.unflatten(1, (heads, size)) for x in qkv[:, 2 * heads * size :].split(heads * size, dim=1))
    wrong = 0
    for cache, new, name in zip(caches, (key, value), ("key_scale", "value_scale"), strict=True):
        scaled = new.cpu().float() / (scales[name].cpu()[:, None] if scales else 1.0)
        expected = torch.zeros(64, heads, size, dtype=torch.uint8)
        expected[slots[slots >= 0]] = scaled[slots >= 0].clamp(-448.0, 448.0).to(FP8).view(torch.uint8)
        wrong += int((cache.cpu().view(torch.uint8).flatten(0, 1) != expected).sum())
    return _row(task, f"{task.what}, numbers that differ", 1, float(wrong), 0.0)


@dataclass(frozen=True)
class Task:
    """An operation on the tests' calls; with a cache's type: on larger inputs."""

    name: str
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    case: int = 0
    """Of attention."""
    scales: str = ""
    """Of caches in 8 bits."""

    @property
    def what(self) -> str:
        if self.cache_dtype is None:
            return "the tests' calls"
        return f"KV {_name(self.cache_dtype)} {self.scales}".rstrip()


def _cases(is_dry: bool) -> list[Case]:
    return DRY_CASES if is_dry else CASES


def tasks(is_dry: bool) -> list[Task]:
    """What is checked, the longest first."""
    # The tests have the interpreter's float16, and its bfloat16 is wrong.
    floats = [torch.float32] if is_dry else [torch.float32, torch.float16, torch.bfloat16]
    # The interpreter multiplies the raw bits of 8-bit numbers, but for what it computes in float32.
    eight_bit = [torch.float32] if is_dry else [torch.float16, torch.bfloat16]
    places = range(len(_cases(is_dry)))
    found = [Task("paged_attention", dtype, dtype, case) for case in places for dtype in floats]
    for dtype in eight_bit:
        found += [Task("paged_attention", dtype, FP8, case, SCALES[2]) for case in places]
        found += [
            Task("paged_attention", dtype, FP8, case, kind) for case in places[:2] for kind in SCALES[:2] if not is_dry
        ]
    found += [Task(name, dtype) for name in WITH_KERNELS for dtype in floats]
    writes = ("write_kv", "rotate_and_write_kv")
    return found + [Task(name, dtype, FP8, scales=kind) for name in writes for dtype in eight_bit for kind in SCALES]


_lost: list[str] = []
"""What broke the device of this process."""


def check(setting: Setting, task: Task) -> Row | None:
    """The row of a task; what raises is a row that is not ok. None where one before it broke this process's device."""
    if _lost:
        return None
    torch.manual_seed(setting.seed)
    torch.set_num_threads(1)
    try:
        if task.cache_dtype is None:
            row = check_operation(setting, task)
        else:
            row = (check_attention if task.name == "paged_attention" else check_write_8_bit)(setting, task)
    except Exception as error:
        row = failed(task, first_line(error))
    try:
        setting.require_device(f"{task.name} {_name(task.dtype)}")
    except DeviceLost as error:
        _lost.append(str(error))
        row = failed(task, str(error))
    return row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def failed(task: Task, text: str) -> Row:
    """The row of a task that has no figure."""
    return _row(task, f"{task.what}: {text}", 0, math.inf, 0.0)


def _row(task: Task, what: str, count: int, error: float, limit: float) -> Row:
    return {
        "operation": task.name,
        "dtype": _name(task.dtype),
        "what": what,
        "calls": count,
        "error": error,
        "limit": limit,
        "ok": "yes" if error <= limit else "NO",
    }


def run(setting: Setting) -> Iterator[Row]:
    """All of it, in several processes: most of the time goes into compiling kernels and into the references.

    A task that breaks a process's device is told so, and what that process did not do any more is done by new ones.
    What is not there when the section's time is over is a row that is not ok.
    """
    setting, left = dataclasses.replace(setting, _flush=None), tasks(setting.is_dry)
    while left and setting.seconds_left() > 0:
        again: list[Task] = []
        for task, row in _round(setting, left):
            if row is None:
                again.append(task)
            else:
                yield row
        left = again
    for task in left:
        yield failed(task, "not done in time")


def _round(setting: Setting, left: list[Task]) -> Iterator[tuple[Task, Row | None]]:
    """What new processes make of tasks; None is to be done again."""
    pool = ProcessPoolExecutor(1 if setting.is_dry else NUM_PROCESSES, multiprocessing.get_context("spawn"))
    futures = {pool.submit(check, setting, task): task for task in left}
    try:
        wait(futures, timeout=max(setting.seconds_left(), 1.0))
        for future, task in futures.items():
            if not future.done():
                yield task, failed(task, "not done in time")
            elif (error := future.exception()) is not None:
                yield task, failed(task, first_line(error))
            else:
                yield task, future.result()
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()  # a kernel that hangs
        for process in processes:
            process.join(5)  # their memory and their kernels are gone before anything is measured
            if process.is_alive():
                process.kill()
