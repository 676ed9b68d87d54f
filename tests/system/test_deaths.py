"""Processes that die or freeze: every open stream ends with a clear status, and `pagewire serve` with them."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest

from pagewire.client import Client
from pagewire.errors import PagewireError, UnavailableError
from tests.system.deployment import Deployment, alive, serving, wait_until

ENDLESS = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0.0}
STREAM_LIMIT_S = 5.0
FREEZE_LIMIT_S = 20.0


def _read_to_the_end(streams):
    """The errors that the streams end with."""
    errors = []
    for stream in streams:
        with pytest.raises(PagewireError) as caught:
            for _ in stream:
                pass
        errors.append(caught.value)
    return errors


@pytest.mark.parametrize("victim", ["worker", "core", "frontend"])
def test_kill_9_ends_streams_and_the_group(victim):
    """kill -9 of any process: UNAVAILABLE on every stream and a non-zero exit within 5 s, and nobody is left.

    Case: vllm#48966
    Case: vllm#39863
    Case: sglang#19972
    """
    with serving() as served, Client(served.target) as client:
        streams = [client.generate(f"Story {i}:", **ENDLESS) for i in range(3)]
        for stream in streams:
            next(stream)
        served.children[victim].kill()
        killed = time.monotonic()
        errors = _read_to_the_end(streams)
        assert time.monotonic() - killed < STREAM_LIMIT_S
        assert all(isinstance(error, UnavailableError) and error.message for error in errors), errors
        assert served.process.popen.wait(STREAM_LIMIT_S) == 1
        assert time.monotonic() - killed < 2 * STREAM_LIMIT_S
        served.process.stop()
        assert f"the {victim} (pid {served.children[victim].pid}) was killed by SIGKILL" in served.process.output
        assert alive(list(served.children.values())) == []


def test_kill_9_of_the_supervisor_leaves_nobody():
    """The children die with their parent.

    Case: vllm#48966
    """
    with serving() as served:
        os.kill(served.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not alive(list(served.children.values())), 15)


def test_interrupt_drains_and_leaves_nobody():
    """SIGINT with a stream open: it may end well, new calls are refused, all processes end, exit status 0.

    Case: llm-d-router#1885
    """
    with serving() as served, Client(served.target) as client:
        stream = client.generate("Count:", max_tokens=24, ignore_eos=True, temperature=0.0)
        parts = [next(stream)]
        os.kill(served.process.pid, signal.SIGINT)
        parts += list(stream)
        assert parts[-1].is_finished
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 24
        assert served.process.popen.wait(30) == 0
        served.process.stop()
        assert alive(list(served.children.values())) == []
        assert "all processes have ended" in served.process.output
        patterns = (r"frontend\[\d+\].*SIGTERM", r"core\[\d+\].*signal received", r"worker\[\d+\].*signal received")
        places = [re.search(pattern, served.process.output) for pattern in patterns]
        assert all(places), served.process.output
        starts = [place.start() for place in places if place is not None]
        assert starts == sorted(starts), "the order is frontend, core, worker"


@pytest.mark.parametrize("victim", ["worker", "core"])
def test_a_frozen_process_ends_streams(victim):
    """SIGSTOP of worker or core, sockets open: silence is death, and the stream says so.

    Case: vllm#17972
    """
    with Deployment() as deployment, Client(deployment.address("frontend")) as client:
        stream = client.generate("Once upon a time", **ENDLESS)
        next(stream)
        process = psutil.Process(deployment.processes[victim].pid)
        process.suspend()
        frozen = time.monotonic()
        (error,) = _read_to_the_end([stream])
        assert time.monotonic() - frozen < FREEZE_LIMIT_S
        assert isinstance(error, UnavailableError), error
        assert victim in error.message
        process.kill()


def test_start_up_ends_when_a_process_does():
    """A core that refuses its settings is said at once, not waited for.

    Case: vllm#17676
    """
    words = r"the core \(pid \d+\) ended with exit status 2 before it was ready"
    with pytest.raises(AssertionError, match=words), serving("--dtype=float99"):
        pass


def test_start_up_deadline():
    """A worker that takes too long: the message names it and the setting.

    Case: vllm#17676
    """
    words = r"the worker was not ready within 1 s.*--startup-timeout-s"
    with pytest.raises(AssertionError, match=words), serving("--startup-timeout-s=1"):
        pass
