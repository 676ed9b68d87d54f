"""What a figure was taken on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine() -> str:
    """Processor, cores, the instructions that matter here, Python and torch."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", info)
    found = re.search(r"^flags\s*: (.*)", info, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    try:
        torch = f", torch {version('torch')}"
    except PackageNotFoundError:
        torch = ""
    cores = f"{len(os.sched_getaffinity(0))} virtual cores"
    processor = model.group(1) if model else platform.processor()
    return f"{processor} ({' '.join(sets)}), {cores}, Python {platform.python_version()}{torch}"
