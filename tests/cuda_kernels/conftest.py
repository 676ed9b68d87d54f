"""Triton's interpreter for the kernels of these tests, and the helper modules of this folder and tests/kernels."""

import os
import sys
from pathlib import Path

import pytest

from kernels.dispatch import CHOICE_VARIABLE

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]
# Read when a kernel is decorated; nothing outside this folder imports kernels.cuda in the tests' own process.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def cuda_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and weights as on CUDA."""
    monkeypatch.setenv(CHOICE_VARIABLE, "interpreter")
