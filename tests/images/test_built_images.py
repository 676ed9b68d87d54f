"""The built images from inside: who runs, what is there, what can be written, and how they end."""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import Any

import pytest

from k8s.tools import lock, play
from tests.images.podman_support import TARGETS, image, version

pytestmark = pytest.mark.ops

# As Kubernetes runs them with the chart's security contexts.
LOCKED = (
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp:mode=1777",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
)
LOOK = """
import importlib.util, json, os, pathlib, shutil, sys, grpc, numpy, pagewire.cli
def can_write(path):
    try:
        pathlib.Path(path, "probe").write_text("x")
    except OSError:
        return False
    return True
spec = importlib.util.find_spec
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "ids": [os.getuid(), os.getgid()], "capabilities": status["CapEff"], "pid": os.getpid(),
    "init": open("/proc/1/comm").read().strip(),
    "modules": [n for n in ("frontend_svc", "core_svc", "worker_svc", "kernels", "torch", "transformers", "tokenizers",
                            "numba", "pip", "triton") if spec(n)],
    "tools": [n for n in ("gcc", "cc", "g++", "clang", "make", "ld", "git") if shutil.which(n)],
    "writable": [p for p in ("/", "/etc", "/opt/pagewire", "/usr/bin", "/tmp") if can_write(p)],
    "compiled": [os.path.exists(m.__cached__) for m in (grpc, numpy, pagewire.cli)],
    "pip_conf": [p for p in ("/etc/pip.conf", "/etc/xdg/pip/pip.conf") if os.path.exists(p)],
    "executable": sys.executable,
}))
"""
MODULES = {
    "frontend": ["frontend_svc", "tokenizers"],
    "core": ["core_svc"],
    "worker-cpu": ["worker_svc", "kernels", "torch", "transformers", "tokenizers", "numba", "pip"],
}


def run(target: str, *arguments: str, options: tuple[str, ...] = LOCKED, timeout_s: float = 120) -> str:
    return play.podman("run", "--rm", *options, image(target), *arguments, timeout_s=timeout_s)


@pytest.fixture(scope="module", params=TARGETS)
def looked(request) -> tuple[str, dict[str, Any]]:
    """(target, what a process in it finds)."""
    entrypoint = '--entrypoint=["/usr/bin/tini", "--", "/opt/pagewire/bin/python"]'
    return request.param, json.loads(run(request.param, "-c", LOOK, options=(*LOCKED, entrypoint)))


def test_it_runs_as_nobody_with_no_rights(looked):
    _, found = looked
    assert found["ids"] == [10001, 10001]
    assert int(found["capabilities"], 16) == 0
    assert found["writable"] == ["/tmp"]


def test_it_has_what_runs_and_no_more(looked):
    target, found = looked
    assert found["modules"] == MODULES[target]
    assert found["tools"] == []
    assert found["pip_conf"] == []
    assert found["compiled"] == [True, True, True]


def test_process_1_is_an_init(looked):
    _, found = looked
    assert found["init"] == "tini" and found["pid"] > 1


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_line_is_the_services_own(target):
    shown = run(target, "--help")
    assert f"usage: pagewire {target.partition('-')[0]}" in shown
    entrypoint = '--entrypoint=["pagewire"]'
    assert run(target, "--version", options=(*LOCKED, entrypoint)).strip() == f"pagewire {version()}"


@pytest.mark.parametrize("target", TARGETS)
def test_labels_and_history(target):
    [found] = json.loads(play.podman("image", "inspect", image(target)))
    labels = found["Labels"]
    assert labels["org.opencontainers.image.title"] == f"pagewire-{target}"
    assert labels["org.opencontainers.image.version"] == version()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])
    assert found["Config"]["StopSignal"] in ("SIGTERM", "15")
    assert found["User"] == "10001:10001"
    history = play.podman("history", "--no-trunc", image(target))
    assert not re.search(r"https?://|find-links", history)


def test_sizes():
    """The bars: core 150 MB and frontend 400 MB beyond the base."""
    script = lock.ROOT / "k8s" / "tools" / "images.sh"
    done = subprocess.run([script, "--sizes"], capture_output=True, text=True, check=True, timeout=60)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    sizes = {name: int(beyond) for name, _, beyond in rows}
    assert sizes["core"] <= 150
    assert sizes["frontend"] <= 400
    assert sizes["worker-cpu"] > sizes["frontend"]


@pytest.mark.parametrize("target", TARGETS)
def test_sigterm_ends_it_also_before_it_has_a_handler(target):
    """As process 1 of its own, Python would ignore the signal while it imports, until SIGKILL."""
    container = play.podman("run", "--detach", *LOCKED, image(target)).strip()
    try:
        started_s = time.monotonic()
        play.podman("stop", "--time", "60", container)
        seconds = time.monotonic() - started_s
        [state] = json.loads(play.podman("inspect", container))
        assert state["State"]["ExitCode"] in (0, 143)
        assert seconds < 30
    finally:
        play.podman("rm", "--force", container, check=False)


def test_orphans_are_reaped():
    script = """
import os, pathlib, time
if (child := os.fork()) == 0:
    if os.fork() == 0:
        os._exit(0)  # an orphan, soon
    os._exit(0)
os.waitpid(child, 0)
time.sleep(0.5)
states = [p.read_text().rpartition(")")[2].split()[0] for p in pathlib.Path("/proc").glob("[0-9]*/stat")]
print(sorted(states))
"""
    entrypoint = '--entrypoint=["/usr/bin/tini", "--", "/opt/pagewire/bin/python"]'
    assert "Z" not in run("core", "-c", script, options=(*LOCKED, entrypoint))
