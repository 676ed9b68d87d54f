"""The chart from the built images, on podman: real text through it, what its processes may do, restarts under load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from k8s.tools import play
from pagewire.client import Client
from pagewire.errors import PagewireError
from tests.images.podman_support import NETWORK, Running, wait_until

pytestmark = [pytest.mark.ops, pytest.mark.timeout(1500)]

PROMPTS = ("The capital of France is", "Water is made of", "One, two, three,", "The sea is")
MAX_TOKENS = 64
LOOK = """
import json, pathlib
def status(pid):
    lines = pathlib.Path("/proc", pid, "status").read_text().splitlines()
    return dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
[service] = pathlib.Path("/proc/1/task/1/children").read_text().split()[:1]
print(json.dumps([status("1"), status(service)]))
"""


def test_the_helm_test_generates_text(running: Running):
    """The pod of `helm test`, with the command that it has there, from the image that it has there."""
    [test] = [one for one in running.plays if one.is_test]
    status, output = play.run_test(test, NETWORK)
    assert status == 0, output + running.logs()
    assert "Paris" in output


def test_processes_run_without_rights(running: Running):
    """Asked of the init and of the service behind it, from inside."""
    for one in running.plays:
        if one.is_test:
            continue
        container = running.container(one.name)
        init, service = json.loads(play.podman("exec", container, "python", "-c", LOOK))
        assert init["Name"] == "tini" and service["PPid"] == "1"
        for status in (init, service):
            assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
            assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        touch = "import pathlib; pathlib.Path('/opt/pagewire/x').touch()"
        with pytest.raises(RuntimeError, match="Read-only file system"):
            play.podman("exec", container, "python", "-c", touch)


def test_ports_are_published_on_loopback_only(running: Running):
    infra = json.loads(play.podman("ps", "--format", "json"))
    ours = [one for one in infra if NETWORK in (one.get("Networks") or ())]
    published = [(port["host_ip"], port["host_port"]) for one in ours for port in one.get("Ports") or ()]
    assert sorted(published) == sorted(("127.0.0.1", port) for port in running.ports.values())


@dataclass
class Load:
    """Clients that stream without end, each from the next frontend that is ready."""

    running: Running
    references: dict[str, str]
    errors: list[str] = field(default_factory=list)
    streams: list[tuple[str, float, float]] = field(default_factory=list)
    """(frontend, begin, end) of each that was whole."""
    active: dict[int, str] = field(default_factory=dict)
    """Client -> frontend from which it has had a first token, and not yet the last."""
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, index: int) -> None:
        turn, prompt = index, PROMPTS[index % len(PROMPTS)]
        while not self.stop.is_set():
            turn += 1
            frontend = self.running.frontends[turn % 2]
            if not self.running.is_ready(frontend):
                continue
            began_s = time.monotonic()
            try:
                text = stream(self.running.target(frontend), prompt, partial(self.active.__setitem__, index, frontend))
            except PagewireError as error:
                self.errors.append(f"{frontend} after {time.monotonic() - began_s:.1f} s: {error}")
                continue
            finally:
                self.active.pop(index, None)
            if text != self.references[prompt]:
                self.errors.append(f"{frontend}: {text!r} instead of {self.references[prompt]!r}")
            self.streams.append((frontend, began_s, time.monotonic()))

    def count(self, frontend: str, since_s: float) -> int:
        return sum(name == frontend and began_s > since_s for name, began_s, _ in self.streams)


def stream(target: str, prompt: str, on_token: Callable[[], None] = lambda: None) -> str:
    """The whole text; raises PagewireError, also where the stream has no end."""
    parts = []
    with Client(target, timeout_s=300) as client:
        for part in client.generate(prompt, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True):
            parts.append(part)
            on_token()
    if not parts or parts[-1].usage is None or parts[-1].usage.completion_tokens != MAX_TOKENS:
        raise PagewireError(f"the stream ended early, after {len(parts)} parts")
    return "".join(part.text for part in parts)


def test_a_rolling_restart_under_load_loses_no_stream(running: Running):
    """Both frontends go, one after the other, as a rollout has it: SIGTERM, wait for the end, start, wait for ready."""
    references = {prompt: stream(running.target(running.frontends[0]), prompt) for prompt in PROMPTS}
    load = Load(running, references)
    threads = [threading.Thread(target=load.run, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    signals: dict[str, float] = {}
    try:
        for name in running.frontends:
            before_s = time.monotonic()
            wait_until(lambda name=name, s=before_s: load.count(name, s) >= 2, 300, f"{name} serves streams")
            wait_until(lambda name=name: name in load.active.values(), 60, f"{name} is in the middle of a stream")
            signals[name] = time.monotonic()
            play.stop(running.play(name))
            [found] = json.loads(play.podman("inspect", running.container(name)))
            assert found["State"]["ExitCode"] == 0
            assert time.monotonic() - signals[name] < running.play(name).grace_s
            play.podman("pod", "start", name)
            wait_until(lambda name=name: running.is_ready(name), 120, f"{name} is ready again")
            again_s = time.monotonic()
            wait_until(lambda name=name, s=again_s: load.count(name, s) >= 1, 300, f"{name} serves again")
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(320)
    assert load.errors == []
    # Not by luck: each frontend had streams when it was told to end.
    for name, signal_s in signals.items():
        assert [1 for frontend, began_s, end_s in load.streams if frontend == name and began_s < signal_s < end_s]
