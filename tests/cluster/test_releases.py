"""The chart on a real API server, with real helm: installed, upgraded, rolled back, beside another, and gone.

The server is Kubernetes 1.20, the oldest that the chart takes and the newest whose source Debian has.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import pytest

from k8s.tools import get_helm, lock
from tests.cluster.control_plane import ControlPlane

pytestmark = [pytest.mark.ops, pytest.mark.timeout(900)]

CHART = str(lock.ROOT / "k8s" / "chart")
NAMESPACE = "default"
WORKLOADS = (
    "deployment/{}-pagewire-frontend",
    "statefulset/{}-pagewire-core",
    "statefulset/worker-of-{}-pagewire-core",
)


@dataclass
class Cluster:
    """helm and kubectl against the control plane."""

    plane: ControlPlane

    def _run(self, tool: str, *arguments: str, check: bool) -> subprocess.CompletedProcess[str]:
        command = [get_helm.helm().with_name(tool), *arguments, f"--kubeconfig={self.plane.kubeconfig}"]
        done = subprocess.run([*command, f"--namespace={NAMESPACE}"], capture_output=True, text=True, timeout=600)
        assert not check or done.returncode == 0, f"{tool} {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done

    def helm(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._run("helm", *arguments, check=check)

    def install(self, release: str, *arguments: str) -> None:
        self.helm("install", release, CHART, "--wait", "--timeout=8m", "--set=metrics.enabled=false", *arguments)

    def upgrade(self, release: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = ("upgrade", release, CHART, "--wait", "--timeout=8m", "--reuse-values", *arguments)
        return self.helm(*words, check=check)

    def get(self, *words: str) -> Any:
        return json.loads(self._run("kubectl", "get", *words, "--output=json", check=True).stdout)

    def wait_for_rollout(self, release: str) -> None:
        for workload in WORKLOADS:
            self._run("kubectl", "rollout", "status", workload.format(release), "--timeout=300s", check=True)

    def pods(self, release: str, component: str = "") -> list[Any]:
        """Those that are not on their way out, of no test."""
        labels = f"app.kubernetes.io/instance={release}" + (
            f",app.kubernetes.io/component={component}" if component else ""
        )
        found = self.get("pods", f"--selector={labels}")["items"]
        return [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
            and pod["metadata"]["labels"]["app.kubernetes.io/component"] != "test"
        ]

    def addresses(self, service: str) -> set[str]:
        """What the endpoints controller has found for a Service."""
        subsets = self.get("endpoints", service).get("subsets") or ()
        return {address["ip"] for subset in subsets for address in subset.get("addresses", ())}

    def status(self, release: str) -> tuple[str, int]:
        found = json.loads(self.helm("status", release, "--output=json").stdout)
        return found["info"]["status"], found["version"]


def eventually(is_so: Callable[[], bool], timeout_s: float = 120) -> bool:
    deadline_s = monotonic() + timeout_s
    while not is_so():
        if monotonic() > deadline_s:
            return False
        sleep(0.5)
    return True


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane) -> Cluster:
    """With the releases `one` and `two` in one namespace."""
    found = Cluster(plane)
    found.install("one")
    found.install("two", "--set=groups.replicas=2")
    return found


def images(pods: list[Any]) -> set[str]:
    return {container["image"] for pod in pods for container in pod["spec"]["containers"]}


def ips(pods: list[Any]) -> set[str]:
    return {pod["status"]["podIP"] for pod in pods}


def test_the_server_is_the_real_one(plane: ControlPlane):
    found = plane.api.call("GET", "/version")
    assert (found["major"], found["minor"].rstrip("+")) == ("1", "20")


def test_both_are_rolled_out(cluster: Cluster):
    for release, groups in (("one", 1), ("two", 2)):
        assert cluster.status(release) == ("deployed", 1)
        cluster.wait_for_rollout(release)
        numbers = [len(cluster.pods(release, component)) for component in ("frontend", "core", "worker")]
        assert numbers == [2, groups, groups]


def test_services_find_the_pods_of_their_own_release(cluster: Cluster):
    for release in ("one", "two"):
        for component in ("frontend", "core", "worker"):
            expected = ips(cluster.pods(release, component))
            service = f"{release}-pagewire-{component}"
            assert eventually(lambda e=expected, s=service: cluster.addresses(s) == e), service
        assert cluster.addresses(f"{release}-pagewire-frontend-headless") == ips(cluster.pods(release, "frontend"))
    assert not ips(cluster.pods("one")) & ips(cluster.pods("two"))


def test_budgets_count_the_pods_of_their_own_release(cluster: Cluster):
    def budget(name: str) -> dict[str, int]:
        status = cluster.get("poddisruptionbudget", name)["status"]
        return {
            key: status.get(key, 0)
            for key in ("currentHealthy", "desiredHealthy", "disruptionsAllowed", "expectedPods")
        }

    expected = {"currentHealthy": 2, "desiredHealthy": 1, "disruptionsAllowed": 1, "expectedPods": 2}
    assert eventually(lambda: budget("one-pagewire-frontend") == expected), budget("one-pagewire-frontend")
    for component in ("frontend", "core", "worker"):
        name = f"two-pagewire-{component}"
        assert eventually(lambda n=name: budget(n) == expected), (name, budget(name))


def test_an_eviction_too_many_is_refused(cluster: Cluster):
    """A drain of nodes asks like this. The second frontend stays until the first is replaced."""
    pods = cluster.pods("one", "frontend")
    cluster.plane.kubelet.is_paused.set()
    try:
        answers = []
        for pod in pods:
            name = pod["metadata"]["name"]
            body = {
                "apiVersion": "policy/v1beta1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": NAMESPACE},
            }
            try:
                cluster.plane.api.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", body)
                answers.append(201)
            except urllib.error.HTTPError as error:
                answers.append(error.code)
        assert answers == [201, 429]
    finally:
        cluster.plane.kubelet.is_paused.clear()
    assert eventually(lambda: len(cluster.addresses("one-pagewire-frontend")) == 2)


def test_helm_test_runs_its_pod(cluster: Cluster):
    """That the hook is run to its end; what its command says is tested on podman, where containers run."""
    shown = cluster.helm("test", "one", "--timeout=3m").stdout
    assert re.search(r"^Phase:\s+Succeeded$", shown, re.MULTILINE)


def test_an_upgrade_replaces_pods_and_a_rollback_brings_them_back(cluster: Cluster):
    before = images(cluster.pods("one"))
    neighbours = {pod["metadata"]["uid"] for pod in cluster.pods("two")}
    tags = [f"--set={tier}.image.tag=0.1.1" for tier in ("frontend", "core", "worker")]
    cluster.upgrade("one", *tags)
    cluster.wait_for_rollout("one")
    assert cluster.status("one") == ("deployed", 2)
    after = images(cluster.pods("one"))
    assert {image.rpartition(":")[2] for image in after} == {"0.1.1"} and len(after) == len(before) == 3

    cluster.helm("rollback", "one", "1", "--wait", "--timeout=8m")
    cluster.wait_for_rollout("one")
    assert cluster.status("one") == ("deployed", 3)
    assert images(cluster.pods("one")) == before
    assert {pod["metadata"]["uid"] for pod in cluster.pods("two")} == neighbours


def test_an_upgrade_that_changes_no_pod_restarts_none(cluster: Cluster):
    uids = {pod["metadata"]["uid"] for pod in cluster.pods("one")}
    cluster.upgrade("one", "--set=commonAnnotations.team=inference,frontend.service.annotations.a=b")
    cluster.wait_for_rollout("one")
    found = cluster.get("service", "one-pagewire-frontend")["metadata"]["annotations"]
    assert found["a"] == "b"
    # commonAnnotations are the pods' too: a change of them is one of the pods.
    assert not uids & {pod["metadata"]["uid"] for pod in cluster.pods("one", "frontend")}
    uids = {pod["metadata"]["uid"] for pod in cluster.pods("one")}
    cluster.upgrade("one", "--set=frontend.service.annotations.a=c,frontend.pdb.maxUnavailable=2")
    assert {pod["metadata"]["uid"] for pod in cluster.pods("one")} == uids


def test_groups_grow_and_shrink(cluster: Cluster):
    cluster.upgrade("one", "--set=groups.replicas=3")
    names = {pod["metadata"]["name"] for pod in cluster.pods("one", "core")}
    assert names == {f"one-pagewire-core-{index}" for index in range(3)}
    assert eventually(lambda: len(cluster.addresses("one-pagewire-worker")) == 3)
    cluster.upgrade("one", "--set=groups.replicas=1")
    assert eventually(lambda: len(cluster.pods("one", "worker")) == len(cluster.pods("one", "core")) == 1)


def test_a_value_that_the_schema_refuses_changes_nothing(cluster: Cluster):
    status = cluster.status("one")
    done = cluster.upgrade("one", "--set=frontend.replicas=-1", check=False)
    assert done.returncode != 0 and "replicas" in done.stderr
    assert cluster.status("one") == status


def test_uninstalling_takes_everything_of_one_release_only(cluster: Cluster):
    two = {pod["metadata"]["uid"] for pod in cluster.pods("two")}
    cluster.helm("uninstall", "one", "--wait", "--timeout=5m")
    kinds = (
        "deployments,statefulsets,services,pods,poddisruptionbudgets,networkpolicies,serviceaccounts,configmaps,secrets"
    )

    def left() -> list[str]:
        found = cluster.get(kinds, "--selector=app.kubernetes.io/instance=one")["items"]
        return [f"{one['kind']}/{one['metadata']['name']}" for one in found]

    # The pod of helm test stays: it is a hook's, for its logs to be read.
    assert eventually(lambda: left() in ([], ["Pod/one-pagewire-test-generate"])), left()
    assert {pod["metadata"]["uid"] for pod in cluster.pods("two")} == two
    assert cluster.status("two")[0] == "deployed"
