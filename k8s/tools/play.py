"""Runs a rendered chart with podman, no cluster needed:

    helm template demo k8s/chart --set imageRegistry=localhost > demo.yaml
    python -m k8s.tools.play up demo.yaml --publish demo-pagewire-frontend-0:50051=50051
    python -m k8s.tools.play test demo.yaml      # what `helm test` would run
    python -m k8s.tools.play down demo.yaml

What changes on the way to podman is said and done in pods.py. Needs podman 4.3 or newer, as root where it has to make
networks, with netavark and aardvark-dns; ports are published on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from k8s.tools.pods import Object, Play, Published, plan

NETWORK = "pagewire"
_OWN_CONFIG = Path(__file__).with_name("containers.conf")
_SYS_RESOURCE = 1 << 24


def environment() -> dict[str, str]:
    """Podman's: with the configuration beside this file where this process can't raise limits (engine.sh says why)."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), 16)
    own = {} if os.geteuid() or capabilities & _SYS_RESOURCE else {"CONTAINERS_CONF": str(_OWN_CONFIG)}
    return {**own, **os.environ}


def podman(*arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 120) -> str:
    """Standard output of a podman command. Raises RuntimeError with what it said where it fails."""
    done = subprocess.run(
        ["podman", *arguments], input=stdin, capture_output=True, text=True, env=environment(), timeout=timeout_s
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def start(play: Play, network: str) -> None:
    """Starts one pod on the network under its names."""
    names = "".join(f",alias={name}" for name in play.aliases)
    podman(
        "kube", "play", "--network", f"{network}:{names.removeprefix(',')}" if names else network, "-",
        stdin=yaml.safe_dump_all(play.documents, sort_keys=False),
    )  # fmt: skip


def up(first: list[Object], plays: list[Play], network: str) -> None:
    """Makes the network where it is missing, then secrets and claims, then every pod that is no test."""
    if network not in podman("network", "ls", "--format", "{{.Name}}").split():
        podman("network", "create", network)
    for found in first:
        podman("kube", "play", "-", stdin=yaml.safe_dump(found))
    for play in plays:
        if not play.is_test:
            start(play, network)


def stop(play: Play, grace_s: int | None = None) -> None:
    """Ends a pod as the kubelet does: SIGTERM, and SIGKILL when its grace period is over. It can be started again.

    Its containers first: `pod stop` would take the network away from them at once, and with it what they drain.
    """
    seconds = play.grace_s if grace_s is None else grace_s
    for container in play.pod["spec"]["containers"]:
        name = f"{play.name}-{container['name']}"
        podman("stop", "--ignore", "--time", str(seconds), name, timeout_s=seconds + 60)
    podman("pod", "stop", "--ignore", play.name)


def down(first: list[Object], plays: list[Play], network: str, *, grace_s: int | None = None) -> None:
    """Removes the pods, in the order of requests, then what they used. What is not there is fine."""
    for play in plays:
        seconds = play.grace_s if grace_s is None else grace_s
        stop(play, seconds)
        podman("pod", "rm", "--ignore", "--force", play.name, check=False)
    for found in first:
        kind = "secret" if found["kind"] == "Secret" else "volume"
        podman(kind, "rm", found["metadata"]["name"], check=False)
    podman("network", "rm", "--force", network, check=False)


def run_test(play: Play, network: str, timeout_s: float = 300) -> tuple[int, str]:
    """Exit status and output of a test pod's container, which is then removed."""
    container = f"{play.name}-{play.pod['spec']['containers'][0]['name']}"
    start(play, network)
    try:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            status, code = podman("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", container).split()
            if status == "exited":
                return int(code), podman("logs", container)
            time.sleep(0.5)
        return 124, podman("logs", container)
    finally:
        podman("pod", "rm", "--force", play.name, check=False)


def _published(text: str) -> Published:
    try:
        left, host_port = text.split("=")
        pod, container_port = left.split(":")
        return Published(pod, int(container_port), int(host_port))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be POD:CONTAINER_PORT=HOST_PORT") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The status of the command; that of the test for `test`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("up", "test", "down", "show"))
    parser.add_argument("file", help="what `helm template` printed; - for standard input")
    parser.add_argument("--network", default=NETWORK, help="podman's network (default: %(default)s)")
    parser.add_argument("--publish", action="append", type=_published, default=[], metavar="POD:PORT=HOST_PORT")
    arguments = parser.parse_args(argv)
    text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text()
    try:
        first, plays = plan(yaml.safe_load_all(text), publish=arguments.publish)
        if arguments.command == "show":
            for play in plays:
                print(f"# names: {' '.join(play.aliases)}\n---\n{yaml.safe_dump_all(play.documents, sort_keys=False)}")
        elif arguments.command == "up":
            up(first, plays, arguments.network)
        elif arguments.command == "down":
            down(first, plays, arguments.network)
        else:
            for play in (play for play in plays if play.is_test):
                status, output = run_test(play, arguments.network)
                print(output)
                if status:
                    return status
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
