"""Every Triton kernel compiles for every kind of GPU, within the registers, spills and shared memory of the table.

What changed since the table was written is compiled here, and one variant of every kernel; all of them take minutes of
several cores: `python -m kernels.cuda.variant`.
"""

from __future__ import annotations

import os
import subprocess
import sys


def test_kernels_compile_within_their_ceilings() -> None:
    chosen = ("TRITON_INTERPRET", "PAGEWIRE_KERNELS")
    environ = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, "-m", "kernels.cuda.variant", "--changed"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
