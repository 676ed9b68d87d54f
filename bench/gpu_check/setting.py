"""Where the check runs, how long it may take, and how it measures."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

_FLUSH_BYTES = 1 << 30
"""Zeros written before each timed run: they push what was read out of the cache of 50 MB, and while they are written
Python gets ahead, so that a launch's own time does not count."""
_NUM_WARM_UPS, _MIN_REPEATS, _MAX_REPEATS = 3, 5, 25


class Skipped(Exception):
    """There was no time or no library; the message says which."""


class DeviceLost(Exception):
    """Nothing runs on the device any more, in this process; the message says what was the last that did."""


def require_triton() -> None:
    """Raises SystemExit where Triton is missing: the operations would run on torch, and be equal to it."""
    if importlib.util.find_spec("triton") is None:
        sys.exit("Triton is not installed: there would be no kernel to check (pip install 'triton>=3.6')")


def require_compiler(device: torch.device) -> None:
    """Raises SystemExit where Triton compiles nothing: it needs a C compiler and Python's headers for each launch."""
    import kernels

    try:
        kernels.silu_and_mul(torch.zeros(1, 8, device=device)).cpu()
    except Exception as error:
        sys.exit(f"Triton can't compile and launch a kernel here: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Of an error with its type; torch's have paragraphs of advice."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@dataclass
class Setting:
    """One run of the check."""

    device: torch.device
    is_dry: bool
    """Tiny shapes on a CPU, to prove the script itself; the times mean nothing."""
    seed: int
    ends_at: float
    """By time.monotonic."""
    copy_rate: float = 1.0
    """Bytes per second that a copy reads and writes; measured first."""
    matmul_rate: float = 1.0
    """Floating point operations per second of a large product in the type that is measured."""
    _flush: torch.Tensor | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is measured; the interpreter can't compute in bfloat16."""
        return torch.float32 if self.is_dry else torch.bfloat16

    def generator(self) -> torch.Generator:
        """The same numbers in every section."""
        return torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers made on the device."""
        return torch.randn(*shape, dtype=dtype or self.dtype, device=self.device)

    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()

    def require(self, seconds: float) -> None:
        """Raises Skipped where less time than that is left."""
        if self.seconds_left() < seconds:
            raise Skipped(f"no time left: {max(self.seconds_left(), 0.0):.0f} s")

    def reason(self, error: Exception) -> str:
        """Why a row has no figure. Raises in a dry run, where every row has one."""
        if isinstance(error, Skipped):
            return str(error)
        if self.is_dry:
            raise error
        return first_line(error)

    def require_device(self, after: str) -> None:
        """Raises DeviceLost where nothing can be launched any more: an error of a kernel comes back from every call."""
        if self.device.type == "cuda":
            try:
                torch.zeros(1, device=self.device).add_(1).item()
            except Exception as error:
                raise DeviceLost(f"{after} broke the device: {first_line(error)}") from error

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], Any], limit_s: float = 0.4) -> float:
        """Median time of a call on the device, with cold caches; stops repeating after about limit_s."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        if self._flush is None:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(_NUM_WARM_UPS):
            run()
        torch.cuda.synchronize()
        deadline, found = time.monotonic() + limit_s, list[float]()
        while len(found) < _MIN_REPEATS or (len(found) < _MAX_REPEATS and time.monotonic() < deadline):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # Written, so that nothing of the run before is in the cache; then read, so that no write is left for the
            # run that is timed.
            self._flush.zero_()
            self._flush.view(torch.int64).sum()
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return median(found)


def measure_limits(setting: Setting) -> Iterator[dict[str, Any]]:
    """What the hardware gives: the rates that everything else is compared with."""
    copied, copy_s = _copy(setting, 1 << (12 if setting.is_dry else 30))
    setting.copy_rate = copied / copy_s
    rate = f"{setting.copy_rate / 1e9:.0f} GB/s"
    yield {"what": f"copy, {copied / 1e9:.1f} GB read and written", "ms": copy_s * 1e3, "rate": rate}
    size = 64 if setting.is_dry else 8192
    a, b = setting.randn(size, size), setting.randn(size, size)
    product_s = setting.seconds(lambda: a @ b, 1.0)
    setting.matmul_rate = 2 * size**3 / product_s
    what = f"{size} x {size} x {size} product in {str(setting.dtype).removeprefix('torch.')}"
    yield {"what": what, "ms": product_s * 1e3, "rate": f"{setting.matmul_rate / 1e12:.0f} TFLOP/s"}


def _copy(setting: Setting, num_elements: int) -> tuple[int, float]:
    """Bytes read and written, and seconds."""
    source = torch.ones(num_elements, dtype=torch.int16, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes, setting.seconds(lambda: target.copy_(source), 1.0)
