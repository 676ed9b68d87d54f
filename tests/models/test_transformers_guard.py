"""transformers must not take our package `kernels` for the Hugging Face package of that name."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.version import Version
from transformers.utils import import_utils

# Pretends that Pagewire has a version which transformers would accept for its `kernels`.
PRETEND = """
import importlib.metadata as metadata
from unittest import mock
real = metadata.version
def version(name):
    if name == "kernels":
        raise metadata.PackageNotFoundError(name)
    return VERSION if name == "pagewire" else real(name)
metadata.version = version
from transformers.utils import import_utils
VERSION = import_utils.KERNELS_MIN_VERSION
found = dict(metadata.packages_distributions(), kernels=["pagewire"])
metadata.packages_distributions = lambda: found
"""
USE = """
import transformers
from transformers.utils import is_kernels_available
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
import kernels
print(is_kernels_available(), kernels.rms_norm.reference.__module__)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_transformers_would_be_fooled_by_some_version() -> None:
    """What the guard is for: without it this version of ours breaks every model."""
    result = run(PRETEND + USE)
    assert result.returncode != 0 and "from 'kernels'" in result.stderr


def test_guard_holds_whatever_our_version() -> None:
    result = run(PRETEND + "import worker_svc.models\n" + USE)
    assert result.stdout.split() == ["False", "kernels.norm"], result.stderr


def test_our_version_is_none_that_transformers_accepts() -> None:
    """Code that imports transformers' models without us has no guard: a release in that range would break it."""
    ours = Version(importlib.metadata.version("pagewire"))
    lowest, highest = Version(import_utils.KERNELS_MIN_VERSION), Version(import_utils.KERNELS_MAX_VERSION)
    assert not lowest <= ours < highest
