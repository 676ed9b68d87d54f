"""What a process says and when it dies: logs, the ready line, signals, the tie to its supervisor."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pagewire.runtime.lifetime import SUPERVISOR_VARIABLE, new_incarnation
from pagewire.runtime.ready import parse_ready, print_ready


def test_ready_line_round_trip(capsys):
    for host in ("127.0.0.1", "::1", "localhost"):
        incarnation = new_incarnation()
        print_ready("core", host, 50052, incarnation)
        ready = parse_ready(capsys.readouterr().out)
        assert ready is not None
        assert (ready.service, ready.host, ready.port, ready.incarnation) == ("core", host, 50052, incarnation)
    assert parse_ready("loading...") is None


def test_incarnations_differ():
    ids = {new_incarnation() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", incarnation) for incarnation in ids)


def _run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env={**os.environ, **environ}
    )


def test_log_format():
    """Time, level, service and pid, logger, message, on stderr, once per line even when set up twice."""
    code = (
        "import logging; from pagewire.runtime.logs import setup_logging\n"
        "setup_logging('core'); setup_logging('core', 'debug')\n"
        "logging.getLogger('core_svc.engine').debug('hello')"
    )
    done = _run(code)
    assert done.stdout == ""
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} DEBUG core\[\d+\] core_svc\.engine: hello\n"
    assert re.fullmatch(pattern, done.stderr), done.stderr


_WAITER = """
import asyncio
from pagewire.runtime.server import wait_for_signal
async def main():
    waiting = asyncio.ensure_future(wait_for_signal())
    await asyncio.sleep(0)
    print("up", flush=True)
    print((await waiting).name, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_does_not_wait(which):
    """The first signal is reported for draining; a second one ends the process at once."""
    with subprocess.Popen([sys.executable, "-c", _WAITER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(which)
            assert process.stdout.readline() == f"{which.name}\n"
            process.send_signal(which)
            assert process.wait(5) == 128 + which
        finally:
            process.kill()


@pytest.mark.parametrize("service", ["frontend", "core", "worker"])
def test_a_signal_before_anything_listens_ends_the_process(service):
    """As a container's first process too, to which signals without a handler do nothing.

    What the process would do next is replaced by a wait, for a start passes too fast to be caught in it.
    """
    code = (
        "import asyncio, runpy, time\n"
        "import pagewire.runtime.settings as settings\n"
        "def wait(*a, **k): print('up', flush=True); time.sleep(60)\n"
        "settings.parse_settings = wait\n"
        f"runpy.run_module('{service}_svc', run_name='__main__')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            process.terminate()
            assert process.wait(5) == 128 + signal.SIGTERM
        finally:
            process.kill()


_CHILD = """
import signal, sys, time
from pagewire.runtime.lifetime import die_with_parent
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
die_with_parent(kill_after_s=1.0)
print("up", flush=True)
time.sleep(60)
"""
_PARENT = f"""
import os, subprocess, sys, time
environ = {{**os.environ, "{SUPERVISOR_VARIABLE}": str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}, sys.argv[1]], env=environ, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("kind", "limit_s"), [("docile", 0.9), ("stubborn", 5.0)])
def test_dies_with_a_killed_parent(kind, limit_s):
    """kill -9 of the supervisor ends its child by SIGTERM, and one that ignores that by SIGKILL.

    Case: vllm#48966
    """
    with subprocess.Popen([sys.executable, "-c", _PARENT, kind], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
            parent.wait(5)
        deadline = time.monotonic() + limit_s
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)
        is_gone = not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        if not is_gone:
            child.kill()
        assert is_gone


def test_parent_gone_before_the_tie():
    """A child that starts after its supervisor died ends at once."""
    done = _run(
        "from pagewire.runtime.lifetime import die_with_parent; die_with_parent()", **{SUPERVISOR_VARIABLE: "1"}
    )
    assert done.returncode == 1
    assert "supervisor is gone" in done.stderr


def test_no_supervisor_no_tie():
    """A process that was started by hand outlives its shell."""
    done = _run("from pagewire.runtime.lifetime import die_with_parent; die_with_parent(); print('alive')")
    assert done.stdout == "alive\n"
