"""What becomes of a rendered chart on its way to podman: pods, names, and nothing else."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import yaml

from k8s.tools import get_helm, lock
from k8s.tools.pods import LEFT_OUT, PROBES, Play, Published, expand, plan, playable

POD_SPEC: dict[str, Any] = {
    "terminationGracePeriodSeconds": 85,
    "containers": [
        {
            "name": "core",
            "image": "localhost/pagewire-core:0.1.0",
            "args": ["--worker=worker-of-$(POD_NAME).svc", "--literal=$$(POD_NAME)", "--unknown=$(OTHER)"],
            "env": [
                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "ATTRIBUTES", "value": "pod=$(POD_NAME)"},
            ],
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "ports": [{"name": "grpc", "containerPort": 50052}, {"name": "health", "containerPort": 50062}],
            "livenessProbe": {"grpc": {"port": 50062}},
            "securityContext": {"readOnlyRootFilesystem": True},
        }
    ],
}
LABELS = {"app": "pagewire", "component": "core"}


def workload(kind: str, name: str = "demo-core", **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": dict(LABELS)}, "spec": copy.deepcopy(POD_SPEC)}
    return {"kind": kind, "metadata": {"name": name, "namespace": "ns"}, "spec": {"template": template, **spec}}


def service(name: str, selector: dict[str, str], port: int = 50052, target: Any = "grpc") -> dict[str, Any]:
    ports = [{"port": port, "targetPort": target}]
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"selector": selector, "ports": ports},
    }


def config(name: str) -> dict[str, Any]:
    return {"kind": "ConfigMap", "metadata": {"name": name}, "data": {"A": "1"}}


def test_a_statefulset_is_its_pods_each_with_a_name_of_its_own():
    _, plays = plan([workload("StatefulSet", replicas=2, serviceName="demo-core"), service("demo-core", LABELS)])
    assert [play.name for play in plays] == ["demo-core-0", "demo-core-1"]
    domain = "demo-core.ns.svc.cluster.local"
    assert plays[1].aliases == ["demo-core", domain, f"demo-core-1.{domain}"]
    assert plays[1].grace_s == 85
    assert plays[1].pod["metadata"]["labels"] == LABELS


def test_a_deployment_has_no_names_of_single_pods():
    _, plays = plan([workload("Deployment", "demo-front", replicas=2), service("demo-front", {"app": "pagewire"})])
    assert [play.aliases for play in plays] == [["demo-front", "demo-front.ns.svc.cluster.local"]] * 2


def test_a_service_names_only_what_it_selects():
    others = [service("other", {"component": "worker"}), service("none", {})]
    elsewhere = service("elsewhere", LABELS)
    elsewhere["metadata"]["namespace"] = "another"
    _, plays = plan([workload("Deployment"), *others, elsewhere])
    assert plays[0].aliases == []


def test_a_service_that_maps_ports_is_refused():
    """A name would lead to the wrong port."""
    with pytest.raises(ValueError, match=r"Service web: a name can't map port 80 to 'grpc'"):
        plan([workload("Deployment"), service("web", LABELS, port=80)])
    with pytest.raises(ValueError, match="a name can't map port 80 to 50052"):
        plan([workload("Deployment"), service("web", LABELS, port=80, target=50052)])
    plan([workload("Deployment"), service("web", LABELS, target=50052)])


def test_the_pod_changes_in_four_ways_only():
    """Probes and long annotations go, variables are filled in, ports are published on the loopback interface."""
    metadata = {"name": "demo-core-0", "annotations": {"short": "a" * 63, "checksum/settings": "b" * 64}}
    before = {"metadata": metadata, "spec": copy.deepcopy(POD_SPEC)}
    untouched = copy.deepcopy(before)
    after = playable(before, [Published("demo-core-0", 50052, 40000)])
    assert before == untouched
    container, expected = after["spec"]["containers"][0], untouched["spec"]["containers"][0]
    assert container["args"] == ["--worker=worker-of-demo-core-0.svc", "--literal=$(POD_NAME)", "--unknown=$(OTHER)"]
    assert container["env"][1] == {"name": "ATTRIBUTES", "value": "pod=demo-core-0"}
    [grpc] = container["ports"]
    assert grpc == {"name": "grpc", "containerPort": 50052, "hostIP": "127.0.0.1", "hostPort": 40000}
    assert "ports" not in playable(before)["spec"]["containers"][0]
    for key in ("args", "ports", "env"):
        container[key] = expected[key]
    expected.pop("livenessProbe")
    untouched["metadata"]["annotations"].pop("checksum/settings")
    assert after == untouched


def test_config_maps_go_with_the_pods_that_read_them():
    first, plays = plan(
        [
            config("settings"),
            config("unused"),
            workload("StatefulSet"),
            {"kind": "Secret", "metadata": {"name": "keys"}},
            {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}},
            None,
        ]
    )
    assert [found["metadata"]["name"] for found in plays[0].documents] == ["settings", "demo-core-0"]
    assert [found["metadata"]["name"] for found in first] == ["keys", "models"]


def test_what_only_a_cluster_reads_is_left_out_and_the_rest_is_not_guessed():
    assert plan([{"kind": kind, "metadata": {"name": "x"}} for kind in LEFT_OUT]) == ([], [])
    with pytest.raises(ValueError, match="Job migrate: a kind that this does not know"):
        plan([{"kind": "Job", "metadata": {"name": "migrate"}}])
    with pytest.raises(ValueError, match="volumeClaimTemplates"):
        plan([workload("StatefulSet", volumeClaimTemplates=[{}])])
    with pytest.raises(ValueError, match="no such pods to publish ports of: nobody"):
        plan([workload("Deployment")], publish=[Published("nobody", 1, 2)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)$(A)y", "x11y"),
        ("$(B)", "$(B)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
    ],
)
def test_variables_are_expanded_as_the_kubelet_does(text, expected):
    assert expand(text, {"A": "1"}) == expected


@pytest.fixture(scope="module")
def chart() -> list[Play]:
    """Of our own chart, with everything that has no need of a cluster."""
    words = [get_helm.helm(), "template", "demo", lock.ROOT / "k8s" / "chart", "--namespace", "ns"]
    done = subprocess.run(
        [*words, "--set", "imageRegistry=localhost,core.settings.max_num_seqs=8"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return plan(yaml.safe_load_all(done.stdout))[1]


def test_the_chart_as_it_is_can_be_played(chart):
    pods = {play.name: play for play in chart}
    assert list(pods) == [
        *(f"demo-pagewire-frontend-{index}" for index in (0, 1)),
        "demo-pagewire-core-0",
        "worker-of-demo-pagewire-core-0",
        "demo-pagewire-test-generate",
    ]
    assert [play.name for play in chart if play.is_test] == ["demo-pagewire-test-generate"]
    for play in chart:
        for container in play.pod["spec"]["containers"]:
            assert not set(container) & set(PROBES)
            assert "$(" not in str(container["args"])


def test_every_address_in_the_chart_is_a_name_of_a_pod(chart):
    """What processes are told to call is what they find on the network."""
    known = {name for play in chart for name in play.aliases}
    words = [word for play in chart for container in play.pod["spec"]["containers"] for word in container["args"]]
    told = [word.partition("=")[2] for word in words if word.startswith(("--core=", "--worker=", "--server="))]
    hosts = {address.removeprefix("dns:///").rpartition(":")[0] for value in told for address in value.split(",")}
    assert len(hosts) == 3
    assert hosts <= known


def test_settings_reach_the_pod_that_reads_them(chart):
    core = next(play for play in chart if play.name == "demo-pagewire-core-0")
    assert [found["kind"] for found in core.documents] == ["ConfigMap", "Pod"]
    assert core.documents[0]["data"] == {"PAGEWIRE_CORE_MAX_NUM_SEQS": "8"}


def test_the_program_shows_what_it_would_play(tmp_path):
    file = tmp_path / "chart.yaml"
    file.write_text(yaml.safe_dump_all([workload("Deployment", replicas=1), service("web", LABELS)]))
    words = [sys.executable, "-m", "k8s.tools.play", "show", str(file)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, cwd=lock.ROOT, timeout=60).stdout
    assert shown.startswith("# names: web web.ns.svc.cluster.local\n")
    assert yaml.safe_load(shown)["metadata"]["name"] == "demo-core-0"
    done = subprocess.run([*words, "--publish", "x:1"], capture_output=True, text=True, cwd=lock.ROOT, timeout=60)
    assert done.returncode == 2 and "POD:CONTAINER_PORT=HOST_PORT" in done.stderr
