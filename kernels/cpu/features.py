"""Which instruction sets this process may use, and which one the product kernels take.

`PAGEWIRE_CPU_ISA` = amx, avx512 or generic takes a lesser one than the processor has: to compare, or to reproduce the
output of a machine without it. Never measured at start: the output must not depend on what a shared machine does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

ISA_VARIABLE = "PAGEWIRE_CPU_ISA"
ISAS = ("amx", "avx512", "generic")
"""From the best to the plainest. amx: tile products of bfloat16 and int8. avx512: dot products of bfloat16 pairs and of
int8 fours. generic: float32 multiply-adds, which LLVM maps onto what there is."""

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's flags as Linux names them; empty where they can't be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


@functools.cache
def isa() -> str:
    """The instruction set of the product kernels, one of ISAS. Raises ValueError for a bad PAGEWIRE_CPU_ISA."""
    wanted = os.environ.get(ISA_VARIABLE, ISAS[0])
    if wanted not in ISAS:
        raise ValueError(f"{ISA_VARIABLE} is {wanted!r}: must be one of {', '.join(ISAS)}")
    usable = {"generic"}
    flags = cpu_flags()
    if {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"} <= flags:
        usable.add("avx512")
        if {"amx_tile", "amx_bf16", "amx_int8"} <= flags and _may_use_tiles():
            usable.add("amx")
    return next(name for name in ISAS[ISAS.index(wanted) :] if name in usable)


@functools.cache
def _may_use_tiles() -> bool:
    """Asks Linux for the tile registers, once per process: their state is saved only for those who asked."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def num_threads() -> int:
    """Threads of a kernel: OMP_NUM_THREADS, or the processors that this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(wanted)) if wanted.isdecimal() else available
