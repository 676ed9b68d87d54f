"""`pagewire serve` as a newcomer sees it: in a terminal, from nothing to an answer to Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import socket
import subprocess
import sys
import time

import psutil

from tests.system.deployment import START_S, WORKER_FLAGS, alive, environment


class Terminal:
    """A process in a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self.master, slave = pty.openpty()
        # setsid and a controlling terminal, so that ^C means SIGINT.
        code = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(),
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def read_until(self, pattern: str, timeout_s: float) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.text):
                return match
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
                except OSError:
                    break
        match = re.search(pattern, self.text)
        assert match is not None, self.text
        return match


def test_a_port_that_is_taken_is_told_at_once():
    """Not after a model has loaded, and nothing is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "pagewire.cli", "serve", f"--port={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "choose others with --host and --port" in done.stderr
    assert "worker" not in done.stderr


def test_a_demo_that_the_model_refuses_does_not_end_serving():
    terminal = Terminal(
        [sys.executable, "-m", "pagewire.cli", "serve", "--port=0", "--max-model-len=16", *WORKER_FLAGS]
    )
    try:
        terminal.read_until(r"The model does not take this prompt \(messages is ", START_S)
        terminal.read_until(r"Ctrl-C ends it", 30)
        os.write(terminal.master, b"\x03")
        terminal.read_until("all processes have ended", 30)
        assert terminal.popen.wait(10) == 0
    finally:
        terminal.popen.kill()
        terminal.popen.wait(10)
        os.close(terminal.master)


def test_serve_in_a_terminal():
    """The answer is visible, the printed call works as it is printed, Ctrl-C ends everything with status 0.

    Case: vllm#48966
    """
    terminal = Terminal([sys.executable, "-m", "pagewire.cli", "serve", "--port=0", *WORKER_FLAGS])
    children: list[psutil.Process] = []
    try:
        match = terminal.read_until(r"\n> (.+)\n\n([^\n]{10,}[\s\S]*?)\n\n\((\d+) tokens in", START_S)
        assert int(match[3]) > 3
        terminal.read_until(r"Ctrl-C ends it", 30)
        for service in ("frontend", "core", "worker"):
            assert re.search(rf"^  {service} +127\.0\.0\.1:\d+$", terminal.text, re.MULTILINE)
        call = re.search(r"^  (\S*pagewire generate .*)$", terminal.text, re.MULTILINE)
        assert call is not None
        done = subprocess.run([*shlex.split(call[1]), "--max-tokens=4"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        children = psutil.Process(terminal.popen.pid).children(recursive=True)
        assert len(children) == 3
        os.write(terminal.master, b"\x03")
        terminal.read_until("all processes have ended", 30)
        assert terminal.popen.wait(10) == 0
        assert alive(children) == []
    finally:
        terminal.popen.kill()
        terminal.popen.wait(10)
        for child in alive(children):
            child.kill()
        os.close(terminal.master)
