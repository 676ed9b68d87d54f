"""A small deployment under load, and `pagewire top` in a real terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.top.top_support import SmallDeployment

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Sources of this checkout, and nothing of the user's that top reads."""
    found = {
        name: value for name, value in os.environ.items() if not name.startswith(("PAGEWIRE_", "COLUMNS", "LINES"))
    }
    paths = [str(ROOT), str(ROOT / "protos"), found.get("PYTHONPATH", "")]
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONIOENCODING": "utf-8"}


def top(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the command into a pipe."""
    command = [sys.executable, "-m", "pagewire.cli", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**environment(), **environ})


class Terminal:
    """A tmux server of its own with one window."""

    def __init__(self, width: int, height: int, *arguments: str) -> None:
        self._socket = f"pagewire-test-{uuid.uuid4().hex[:12]}"
        command = [sys.executable, "-m", "pagewire.cli", "top", *arguments]
        keep = 'trap : INT; echo before; "$@"; echo "after: $?"; sleep 60'
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("-f", os.devnull, "new-session", "-d", *size, "sh", "-c", keep, "sh", *command)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-L", self._socket, *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            env={**environment(), "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def capture(self) -> list[str]:
        """The screen's lines."""
        return self._tmux("capture-pane", "-p").splitlines()

    def wait_for(self, condition: Callable[[list[str]], bool], timeout_s: float = 20) -> list[str]:
        """The first screen of which the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition(lines := self.capture()):
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.05)
        return lines

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    """Makes terminals, and takes them away."""
    opened: list[Terminal] = []

    def make(width: int, height: int, *arguments: str) -> Terminal:
        opened.append(Terminal(width, height, *arguments))
        return opened[-1]

    yield make
    for terminal in opened:
        terminal.close()


@pytest.fixture(scope="module")
def deployment() -> Iterator[SmallDeployment]:
    with SmallDeployment() as running:
        yield running
