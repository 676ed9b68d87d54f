"""The threads that share a kernel's work, chunk by chunk.

A kernel's work is a function f(args_address, chunk) for chunk in range(num_chunks). Every thread takes the next chunk
when it has done one, so a thread that has lost its processor to another process holds up at most the chunk that it is
in, and one that sleeps holds up nothing: the caller goes on alone. An OpenMP barrier waits for all of its threads
instead. What a chunk computes must not depend on who computes it.
"""

from __future__ import annotations

import mmap
import os
import threading

import torch

from kernels.cpu import jit
from kernels.cpu.atomics import (
    EVERYONE,
    atomic_add,
    atomic_load,
    atomic_store,
    call_at,
    compare_and_swap,
    current_cpu,
    futex_wait,
    futex_wake,
    has_futex,
    pause,
    run_on,
)
from kernels.cpu.features import num_threads
from kernels.cpu.vectors import get_int64, put_int64, stack

# The words of a team's state, each on a cache line pair of its own.
_WORK = 0  # job number << 32 | chunks not taken
_JOB = 128  # function, address of its arguments
_PENDING = 256  # chunks not done
_HELPERS_SLEEP = 384  # 1: some helper may sleep
_CALLER_SLEEPS = 512
_IS_BUSY = 640  # some thread is calling
_SPIN = 768  # rounds that a helper, then the caller, waits awake
_CALLER_CPU = 896
_NUM_CPUS = 904
_CPUS = 1024  # 1024 bits: the processors that helpers may run on
STATE_BYTES = 1152
_CHUNKS = 0xFFFFFFFF
HELPER_SPINS = 2000
CALLER_SPINS = 200
"""Rounds of `pause` (about 0.05 us each) before a thread sleeps. Measured: all products of SmolLM2-135M for one row,
median and most of 12, on a machine where one or two processes wake for 0.3 ms every 10 ms and others compile:

    helper, caller           0, 0        200, 200    2000, 200   2000, 2000  2000, never  torch (OpenMP)
    one that wakes           25.9 30.1   26.2 28.2   21.1 30.8   27.3 30.8   29.0 32.9    41.7 116 ms
    two that wake            17.3 28.7   17.0 26.0   16.1 28.2   16.7 27.9   15.5 27.8    39.0 47 ms

A caller that sleeps early frees its processor for the helper that it waits for.
"""


@jit.inlined
def _work(state: int) -> None:
    """Takes and does chunks until none is left."""
    while True:
        word = atomic_load(state + _WORK)
        left = word & _CHUNKS
        if left == 0:
            return
        # If the word is still the same when a chunk is taken, its job was not over, so the description is that job's.
        function, args, total = get_int64(state + _JOB), get_int64(state + _JOB + 8), get_int64(state + _JOB + 16)
        if compare_and_swap(state + _WORK, word, word - 1):
            call_at(function, args, total - left)
            if atomic_add(state + _PENDING, -1) == 1 and atomic_load(state + _CALLER_SLEEPS) == 1:
                atomic_store(state + _CALLER_SLEEPS, 0)
                futex_wake(state + _CALLER_SLEEPS, 1)


@jit.inlined
def _move_away(state: int) -> None:
    """Leaves the caller's processor: Linux likes to wake a thread where its waker runs, and then both take turns."""
    cpu = atomic_load(state + _CALLER_CPU)
    if get_int64(state + _NUM_CPUS) < 2 or cpu != current_cpu():
        return
    others = stack(128)
    for word in range(16):
        put_int64(others + 8 * word, get_int64(state + _CPUS + 8 * word))
    place = others + cpu // 64 * 8
    put_int64(place, get_int64(place) & ~(1 << (cpu % 64)))
    run_on(others)


@jit.inlined
def _help(state: int) -> None:
    """A helper's life."""
    while True:
        _move_away(state)
        _work(state)
        spins = get_int64(state + _SPIN)
        while spins > 0 and atomic_load(state + _WORK) & _CHUNKS == 0:
            spins -= 1
            pause()
        if spins == 0:
            atomic_store(state + _HELPERS_SLEEP, 1)
            if atomic_load(state + _WORK) & _CHUNKS == 0:
                futex_wait(state + _HELPERS_SLEEP, 1)


@jit.inlined
def share(state: int, function: int, args: int, num_chunks: int) -> None:
    """Runs all chunks on the team (state 0: on this thread alone) and returns when they are done."""
    if state == 0 or num_chunks <= 1 or not compare_and_swap(state + _IS_BUSY, 0, 1):
        for chunk in range(num_chunks):
            call_at(function, args, chunk)
        return
    atomic_store(state + _CALLER_CPU, current_cpu())
    put_int64(state + _JOB, function)
    put_int64(state + _JOB + 8, args)
    put_int64(state + _JOB + 16, num_chunks)
    atomic_store(state + _PENDING, num_chunks)
    job = (atomic_load(state + _WORK) >> 32) + 1
    atomic_store(state + _WORK, ((job & 0x7FFFFFFF) << 32) | num_chunks)
    if atomic_load(state + _HELPERS_SLEEP) == 1:
        atomic_store(state + _HELPERS_SLEEP, 0)
        futex_wake(state + _HELPERS_SLEEP, EVERYONE)
    _work(state)
    spins = get_int64(state + _SPIN + 8)
    while atomic_load(state + _PENDING) > 0:
        if spins > 0:
            spins -= 1
            pause()
            continue
        atomic_store(state + _CALLER_SLEEPS, 1)
        if atomic_load(state + _PENDING) > 0:
            futex_wait(state + _CALLER_SLEEPS, 1)
    atomic_store(state + _CALLER_SLEEPS, 0)
    atomic_store(state + _IS_BUSY, 0)


class Team:
    """The calling thread and its helpers; `state` is what `share` takes."""

    def __init__(self, size: int) -> None:
        self.size = size if has_futex() else 1
        self._memory = torch.frombuffer(
            mmap.mmap(-1, STATE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
        )
        self.state = self._memory.data_ptr() if self.size > 1 else 0
        if not self.state:
            return
        spins = self._memory.view(torch.int64)[_SPIN // 8 :]
        spins[0], spins[1] = HELPER_SPINS, CALLER_SPINS
        cpus = [cpu for cpu in os.sched_getaffinity(0) if cpu < 1024]
        self._memory.view(torch.int64)[_NUM_CPUS // 8] = len(cpus)
        for cpu in cpus:
            self._memory[_CPUS + cpu // 8] |= 1 << cpu % 8
        _help.compile("void(int64)")  # type: ignore[attr-defined]
        for number in range(1, self.size):
            name = f"kernels-{number}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        # A method: the thread, which never ends, keeps the state's memory.
        _help(self.state)


_team: Team | None = None


def team() -> Team:
    """This process's team, of `num_threads()`; starts it at the first call."""
    global _team
    if _team is None:
        _team = Team(num_threads())
    return _team


def _forget() -> None:
    """A forked child has no helpers."""
    global _team
    _team = None


os.register_at_fork(after_in_child=_forget)
