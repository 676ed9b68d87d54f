"""How much memory there is: this machine's, this container's, a GPU's."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from pagewire.errors import InvalidArgumentError, violation

# cgroup version 2, then version 1: folder, limit, use, and what of the use is file pages that the kernel gives back
# when memory is short. A model file that was just read is all such pages.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
DEFAULT_CPU_BUDGET_BYTES = 2 << 30
_CPU_SHARE = 0.25


def device_named(name: str) -> torch.device:
    """The device of a name, such as cpu, cuda or cuda:1; InvalidArgumentError where it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError([violation("device", name, "must be cpu, cuda or cuda:<index>")]) from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        build = torch.version.cuda or "none: this is a build for the CPU"
        limit = f"torch {torch.__version__} (CUDA {build}) sees {count} CUDA devices: must be cpu, or one of those"
        raise InvalidArgumentError([violation("device", name, limit)], reason="NO_SUCH_DEVICE")
    return torch.device("cuda", index)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken: of the GPU, or of the host within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_host_available_bytes()]
    for folder, limit_file, usage_file, reclaimable in _CGROUPS:
        limit, usage = _read_int(f"{folder}/{limit_file}"), _read_int(f"{folder}/{usage_file}")
        if limit is not None and usage is not None:
            found.append(max(limit - usage + _read_stat(f"{folder}/memory.stat", reclaimable), 0))
    return min(found)


def default_kv_budget_bytes(device: torch.device) -> int:
    """The KV pool's share where nobody said: 2 GiB, at most a quarter. A GPU's is measured (profile_run)."""
    return min(DEFAULT_CPU_BUDGET_BYTES, int(available_bytes(device) * _CPU_SHARE))


def give_memory_back() -> None:
    """Hands to the system what the allocators keep: after loading, 40 MB of 760 for SmolLM2-135M; on a GPU a pool."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # GNU's C library
        trim(0)


def _host_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_stat(path: str, name: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max"
