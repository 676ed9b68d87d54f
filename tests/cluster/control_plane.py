"""A real Kubernetes control plane on the loopback interface: etcd, API server, controllers and scheduler.

Nothing runs a container: FakeKubelet says of every pod that is bound to its node that it runs and is ready. So this
proves what the API server thinks of manifests, selectors, budgets, rollouts and hooks, not the workload.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_ports

TOKEN = "admin"  # of a server that lives for a test, on the loopback interface
NODE = "node-0"


def binaries() -> Path:
    """What k8s/tools/build_kubernetes.sh has built; an error that says so where it has not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = cache / "pagewire-kubernetes" / "bin"
    assert (found / "kube-scheduler").exists(), f"no API server in {found}: run `make cluster`"
    return found


class Api:
    """Plain HTTPS to the API server."""

    def __init__(self, port: int, ca_file: Path) -> None:
        self.url = f"https://127.0.0.1:{port}"
        self._ca_file = ca_file

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer's JSON. Raises urllib's HTTPError with the status."""
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        request.add_header("Content-Type", kind)
        data = None if body is None else json.dumps(body).encode()
        context = ssl.create_default_context(cafile=str(self._ca_file))
        with urllib.request.urlopen(request, data=data, timeout=30, context=context) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def patch_status(self, path: str, status: Any) -> None:
        with contextlib.suppress(urllib.error.HTTPError):  # gone, or changed meanwhile: the next turn sees it
            self.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")

    def is_ready(self) -> bool:
        try:
            return bool(self.call("GET", "/readyz") == "ok")
        except (OSError, ValueError):
            return False


class FakeKubelet:
    """One node that is ready. Its pods run as soon as they are bound, and are gone as soon as they are told to end."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._num_ips = 0
        self._stop = threading.Event()
        self.is_paused = threading.Event()
        """While set, no pod becomes ready and none goes."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._api.call(
            "POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}}
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        beat_s = 0.0
        while not self._stop.wait(0.3):
            with contextlib.suppress(OSError, ValueError):
                if time.monotonic() - beat_s > 5:
                    self._beat()
                    beat_s = time.monotonic()
                if not self.is_paused.is_set():
                    for pod in self._api.call("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={NODE}")["items"]:
                        self._serve(pod)

    def _beat(self) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Fake",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"conditions": [ready], "capacity": capacity, "allocatable": capacity}
        self._api.patch_status(f"/api/v1/nodes/{NODE}", status)

    def _serve(self, pod: Any) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "deletionTimestamp" in metadata:
            with contextlib.suppress(urllib.error.HTTPError):
                self._api.call("DELETE", path, {"gracePeriodSeconds": 0})
            return
        if pod["status"].get("phase") in ("Running", "Succeeded"):
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        is_once = pod["spec"]["restartPolicy"] == "Never"
        self._num_ips += 1
        address = f"10.99.{self._num_ips // 250}.{self._num_ips % 250 + 1}"
        state = (
            {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}
            if is_once
            else {"running": {"startedAt": now}}
        )
        containers = [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": "",
                "ready": not is_once,
                "restartCount": 0,
                "state": state,
            }
            for c in pod["spec"]["containers"]
        ]
        kinds = (
            ("Initialized", "PodScheduled") if is_once else ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        )
        status = {
            "phase": "Succeeded" if is_once else "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now,
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
            "containerStatuses": containers,
        }
        self._api.patch_status(path, status)


class ControlPlane:
    """The processes, and a kubeconfig for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        etcd, peer, self._port, controllers, scheduler = free_ports(5)
        self._ports = {"etcd": etcd, "peer": peer, "controllers": controllers, "scheduler": scheduler}
        self.kubeconfig = folder / "kubeconfig"
        self.api = Api(self._port, folder / "certs" / "apiserver.crt")
        self.kubelet = FakeKubelet(self.api)

    def _spawn(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder))

    def start(self) -> None:
        """All of it, until the node is there. Raises AssertionError with the log of what did not come up."""
        bin_dir, ports, folder = binaries(), self._ports, self._folder
        etcd = shutil.which("etcd")
        assert etcd is not None, "etcd is missing: apt-get install etcd-server"
        (folder / "tokens").write_text(f"{TOKEN},admin,1,system:masters\n")
        key = str(folder / "service-accounts.key")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
        etcd_url, peer_url = f"http://127.0.0.1:{ports['etcd']}", f"http://127.0.0.1:{ports['peer']}"
        self._spawn(
            "etcd", etcd, f"--data-dir={folder}/etcd", f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}", f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=default={peer_url}",
        )  # fmt: skip
        self._spawn(
            "apiserver", str(bin_dir / "kube-apiserver"), f"--etcd-servers={etcd_url}", "--bind-address=127.0.0.1",
            f"--secure-port={self._port}", "--insecure-port=0", f"--cert-dir={folder}/certs",
            f"--token-auth-file={folder}/tokens", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.98.0.0/24",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", "--endpoint-reconciler-type=none",
        )  # fmt: skip
        self._wait_for("apiserver", self.api.is_ready)
        self._write_kubeconfig()
        common = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1", "--port=0")
        self._spawn(
            "controllers", str(bin_dir / "kube-controller-manager"), *common, f"--secure-port={ports['controllers']}",
            f"--service-account-private-key-file={key}", f"--cert-dir={folder}/certs-controllers",
        )  # fmt: skip
        self._spawn(
            "scheduler", str(bin_dir / "kube-scheduler"), *common, f"--secure-port={ports['scheduler']}",
            f"--cert-dir={folder}/certs-scheduler",
        )  # fmt: skip
        self.kubelet.start()
        self._wait_for("controllers", self._has_default_account)

    def _has_default_account(self) -> bool:
        try:
            self.api.call("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        except OSError:
            return False
        return True

    def _wait_for(self, name: str, is_so: Any, timeout_s: float = 180) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            ended = [one.args for one in self._processes if one.poll() is not None]
            log = (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]
            assert not ended and time.monotonic() < deadline_s, f"{name} did not come up:\n{log}"
            time.sleep(0.3)

    def _write_kubeconfig(self) -> None:
        cluster = {"server": self.api.url, "certificate-authority": str(self._folder / "certs" / "apiserver.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self.kubeconfig.chmod(0o600)

    def stop(self) -> None:
        """Ends what was started, the API server before its store."""
        self.kubelet.stop()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    found = ControlPlane(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
