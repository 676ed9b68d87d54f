"""The chart on podman, as the tests use it: rendered by helm, played from the built images, asked over loopback."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k8s.tools import get_helm, lock, play
from k8s.tools.pods import Object, Play, Published, plan
from tests.ports import free_ports
from worker_svc.fetch import resolve_model

RELEASE, NETWORK = "imgtest", "pagewire-images-test"
TARGETS = {"frontend": "frontend_svc", "core": "core_svc", "worker-cpu": "worker_svc"}
START_S = 600.0
"""Most seconds until a deployment answers. Kernels are compiled anew: a container's cache is empty."""


def version() -> str:
    lines = (lock.ROOT / "pyproject.toml").read_text().splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("version = "))


def image(target: str) -> str:
    """A built image's name; an error that says what to do where there is none."""
    name = f"localhost/pagewire-{target}:{version()}"
    done = subprocess.run(["podman", "image", "exists", name], env=play.environment(), timeout=300, check=False)
    assert done.returncode == 0, f"{name} is not there: run `make images`"
    return name


def values() -> Object:
    """Small, and with the model's file from this machine: a worker would fetch it, but a test need not."""
    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    return {
        "imageRegistry": "localhost",
        "frontend": {"replicas": 2, "lameDuckSeconds": 3, "drainSeconds": 120},
        "core": {"settings": {"max_num_seqs": 8}, "lameDuckSeconds": 0, "drainSeconds": 5},
        "worker": {
            "settings": {"kv_cache_memory": "256MiB", "num_threads": 1},
            "extraVolumes": [{"name": "model", "hostPath": {"path": str(path.parent), "type": "Directory"}}],
            "extraVolumeMounts": [
                {
                    "name": "model",
                    "mountPath": f"/var/cache/pagewire/models/{path.parent.name}",
                    "readOnly": True,
                }
            ],
        },
        "tests": {"timeoutSeconds": 120},
    }


def render(chart_values: Object, folder: Path) -> str:
    """What helm makes of the chart."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(chart_values))
    command = [get_helm.helm(), "template", RELEASE, lock.ROOT / "k8s" / "chart", "--values", file]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.3)


@dataclass
class Running:
    """A played chart."""

    plays: list[Play]
    ports: dict[tuple[str, int], int]
    """(pod, container's port) -> port of the loopback interface."""
    frontends: list[str] = field(default_factory=list)

    def play(self, name: str) -> Play:
        return next(one for one in self.plays if one.name == name)

    def container(self, pod: str) -> str:
        return f"{pod}-{self.play(pod).pod['spec']['containers'][0]['name']}"

    def target(self, frontend: str) -> str:
        return f"127.0.0.1:{self.ports[frontend, 50051]}"

    def is_ready(self, frontend: str) -> bool:
        """What the kubelet's readiness probe would find."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[frontend, 50061]}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                found = stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=5)
            except grpc.RpcError:
                return False
            return bool(found.status == health_pb2.HealthCheckResponse.SERVING)

    def logs(self) -> str:
        return "\n".join(
            f"--- {one.name}\n" + play.podman("logs", "--tail", "30", self.container(one.name), check=False)
            for one in self.plays
            if not one.is_test
        )


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[Running]:
    """Frontends, core and worker, ready; removed at the end whatever happened."""
    text = render(values(), folder)
    frontends = [f"{RELEASE}-pagewire-frontend-{index}" for index in (0, 1)]
    wanted = [(name, port) for name in frontends for port in (50051, 50061)]
    ports = dict(zip(wanted, free_ports(len(wanted)), strict=True))
    publish = [Published(pod, port, host_port) for (pod, port), host_port in ports.items()]
    first, plays = plan(yaml.safe_load_all(text), publish=publish)
    running = Running(plays, ports, frontends)
    play.down(first, plays, NETWORK, grace_s=0)
    try:
        play.up(first, plays, NETWORK)
        try:
            for name in frontends:
                wait_until(lambda name=name: running.is_ready(name), START_S, f"{name} is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{running.logs()}") from None
        yield running
    finally:
        play.down(first, plays, NETWORK, grace_s=2)
