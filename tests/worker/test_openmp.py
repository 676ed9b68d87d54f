"""The worker bounds how long OpenMP threads spin, before torch reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)]
)
def test_the_bound_is_there_before_torch(chosen, expected):
    code = """
import builtins, os, sys
real = builtins.__import__
def watched(name, *args, **kwargs):
    if name == "torch" or name.startswith("worker_svc.process"):
        print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
        os._exit(0)
    return real(name, *args, **kwargs)
builtins.__import__ = watched
from worker_svc.__main__ import main
main(["--port=0"])
"""
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **chosen}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(expected), "False"], done.stderr
