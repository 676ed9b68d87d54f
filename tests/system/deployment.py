"""Real processes for tests: three services with SmolLM2, or `pagewire serve` around them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import psutil

from pagewire.runtime.lifetime import SUPERVISOR_VARIABLE
from pagewire.runtime.ready import Ready, parse_ready

START_S = 240.0
# One thread: the suite shares two cores with its clients, and spinning OpenMP threads would fight over them.
WORKER_FLAGS = ("--model=smollm2", "--num-threads=1", "--kv-cache-memory=256MiB")


def environment() -> dict[str, str]:
    """Ours, without settings that a developer may have exported, and tied to this process's life."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PAGEWIRE_")}
    # In a container a log that is no terminal's is JSON; tests read text.
    kept["PAGEWIRE_LOG_FORMAT"] = "text"
    if "PAGEWIRE_CACHE" in os.environ:
        kept["PAGEWIRE_CACHE"] = os.environ["PAGEWIRE_CACHE"]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


class Process:
    """A child process whose output is collected line by line."""

    def __init__(self, command: Sequence[str], *, environ: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ or environment(),
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_line(self, wanted: Callable[[str], Any], timeout_s: float = START_S) -> Any:
        """What `wanted` finds in the next line in which it finds something."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                raise AssertionError(f"the process ended with {self.popen.wait(10)}:\n{self.output}")
            if found := wanted(line):
                return found
        raise AssertionError(f"the line did not come within {timeout_s} s:\n{self.output}")

    def stop(self, timeout_s: float = 45.0) -> int:
        """SIGTERM and the exit status; SIGKILL where that does not help."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
            raise
        finally:
            self._reader.join(5)
            if self.popen.stdout is not None:
                self.popen.stdout.close()


class Deployment:
    """Worker, core and frontend on free ports."""

    def __init__(
        self,
        core_flags: Sequence[str] = (),
        frontend_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`worker_flags` take the place of WORKER_FLAGS."""
        self.processes: dict[str, Process] = {}
        self.ready: dict[str, Ready] = {}
        self._environ = environ or {}
        self._core_flags, self._frontend_flags, self._worker_flags = core_flags, frontend_flags, worker_flags

    def __enter__(self) -> Self:
        try:
            self.start("worker", *(self._worker_flags or WORKER_FLAGS))
            self.start("core", f"--worker={self.ready['worker'].address}", *self._core_flags)
            self.start("frontend", f"--core={self.ready['core'].address}", *self._frontend_flags)
        except BaseException:
            self.kill()
            raise
        return self

    def start(self, service: str, *flags: str) -> Ready:
        environ = {**environment(), **self._environ, SUPERVISOR_VARIABLE: str(os.getpid())}
        process = Process([sys.executable, "-m", f"{service}_svc", "--port=0", *flags], environ=environ)
        self.processes[service] = process
        self.ready[service] = process.wait_line(parse_ready)
        return self.ready[service]

    def address(self, service: str) -> str:
        return self.ready[service].address

    def kill(self) -> None:
        for process in self.processes.values():
            process.popen.kill()
            process.stop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            for service in ("frontend", "core", "worker"):
                process = self.processes[service]
                if process.popen.poll() is None:
                    os.kill(process.pid, signal.SIGCONT)
                    process.stop()
        finally:
            self.kill()


class Served:
    """A running `pagewire serve`."""

    def __init__(self, process: Process, target: str) -> None:
        self.process = process
        self.target = target
        self.children = {
            service: child
            for child in psutil.Process(process.pid).children(recursive=True)
            for service in ("frontend", "core", "worker")
            if f"{service}_svc" in child.cmdline()
        }
        assert set(self.children) == {"frontend", "core", "worker"}


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run: neither gone nor a zombie."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(is_so: Callable[[], Any], timeout_s: float) -> bool:
    """Whether it became so in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.02)
    return bool(is_so())


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """`pagewire serve` on a free port, killed with all its children at the end whatever happened."""
    command = [sys.executable, "-m", "pagewire.cli", "serve", "--port=0", "--no-demo", *WORKER_FLAGS, *flags]
    process = Process(command)
    try:
        target = process.wait_line(lambda line: line.split("--server ")[1].split()[0] if "--server " in line else None)
        served = Served(process, target)
        yield served
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.popen.poll() is None else []
        process.popen.kill()
        for child in alive(children):
            child.kill()
        process.stop()
