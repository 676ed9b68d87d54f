"""A side's processes as one group: started together, stopped while others are measured, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.memory import cpu_seconds, family, resident_bytes

ROOT = Path(__file__).resolve().parent.parent
QUIT_TIMEOUT_S = 20
BUSY_SHARE = 0.05
"""A side that takes more than this share of a core while it has nothing to do is stopped while others run."""


class SideError(RuntimeError):
    """A side could not start, or failed at a workload."""


class ProcessGroup:
    """Processes of one command. Standard output is a pipe where asked, and otherwise in the log with the rest."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], *, has_pipes: bool) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile("w+", prefix="bench-", suffix=".log")  # noqa: SIM115  (close)
        self._is_busy_when_idle = False
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_pipes else self._log,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def said(self) -> str:
        """What the processes have written to the log so far."""
        return Path(self._log.name).read_text(errors="replace")

    def last_words(self) -> str:
        """The log's last lines, for an error message."""
        lines = [line for line in self.said().splitlines() if line.strip()]
        return f"{self.name} ended: {' | '.join(lines[-3:]) or 'it said nothing'}"

    def pids(self) -> list[int]:
        return family(self._process.pid)

    def resident_bytes(self) -> int:
        """Memory of all processes, shared pages counted once."""
        return resident_bytes(self.pids())

    def check_idle(self, seconds: float = 1.0, tries: int = 8) -> float:
        """Share of a core taken without any work; a side that is busy is stopped between its passes from now on."""
        share = 0.0
        for _ in range(tries):  # what a start left to do may take a moment
            before = cpu_seconds(self.pids())
            time.sleep(seconds)
            share = (cpu_seconds(self.pids()) - before) / seconds
            if share <= BUSY_SHARE:
                break
        self._is_busy_when_idle = share > BUSY_SHARE
        self.rest()
        return share

    def rest(self) -> None:
        """Stops (SIGSTOP) what would otherwise turn a core while others are measured."""
        if self._is_busy_when_idle:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        if self._is_busy_when_idle:
            os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Asks politely, waits, and makes sure that nothing of the group is left."""
        self.go_on()
        self._ask_to_quit()
        for end in (self._process.terminate, lambda: os.killpg(self._process.pid, signal.SIGKILL)):
            try:
                self._process.wait(QUIT_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                end()
        self._process.wait(QUIT_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # nothing was left
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()

    def _ask_to_quit(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
