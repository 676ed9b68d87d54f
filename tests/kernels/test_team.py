"""Threads that share a kernel's chunks: every chunk runs once, whoever calls, sleeps, forks or is late."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu import jit, team
from kernels.cpu.atomics import atomic_add
from kernels.cpu.vectors import get_int64

pytestmark = pytest.mark.skipif(not team.has_futex(), reason="threads can't wake each other here")


@jit.chunks
def count_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """args: the address of one int64 per chunk."""
    atomic_add(get_int64(args) + 8 * chunk, 1)


@jit.inlined
def share_often(state, function, args, num_chunks, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        team.share(state, function, args, num_chunks)


def counted(state: int, num_chunks: int, times: int) -> torch.Tensor:
    counts = torch.zeros(num_chunks, dtype=torch.int64)
    args = torch.tensor([counts.data_ptr()])
    share_often(state, count_chunk.address, args.data_ptr(), num_chunks, times)
    return counts


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_chunk_runs_once(size: int) -> None:
    """With more threads than processors too; the helpers sleep in between."""
    some = team.Team(size)
    for num_chunks in (1, 2, 3, 17, 64):
        assert counted(some.state, num_chunks, 2000).tolist() == [2000] * num_chunks
        time.sleep(0.02)
        assert counted(some.state, num_chunks, 1).tolist() == [1] * num_chunks


def test_callers_at_once() -> None:
    """One has the helpers, the others work alone."""
    some, results = team.Team(3), []
    callers = [threading.Thread(target=lambda: results.append(counted(some.state, 9, 3000))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert [counts.tolist() for counts in results] == [[3000] * 9] * 4


def test_helpers_sleep_when_there_is_nothing_to_do() -> None:
    some = team.Team(2)
    counted(some.state, 4, 10)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_forked_child_has_a_team_of_its_own() -> None:
    code = """if True:
        import os, torch
        os.environ["OMP_NUM_THREADS"] = "2"
        import kernels
        from kernels.float_weight import FloatWeight
        weight = FloatWeight([64], 64, torch.float32)
        weight.fill(torch.ones(64, 64))
        assert int(kernels.linear(torch.ones(3, 64), weight)[0, 0]) == 64
        if os.fork() == 0:
            os._exit(int(kernels.linear(torch.ones(3, 64), weight)[0, 0]))
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 64
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_processes_that_start_at_once_share_one_cache(tmp_path: Path) -> None:
    """Three with an empty cache compile and agree; a later one reads what they left."""
    code = """if True:
        import logging, sys, time, torch
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        from kernels.cpu import jit, products
        with jit.compiling("a test"):
            products.warm_up(torch.float32)
    """
    env = {**os.environ, jit.CACHE_VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    logs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum("once per version" in log for log in logs) == 1, logs
    last = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert last.returncode == 0 and "read from the cache" in last.stdout
