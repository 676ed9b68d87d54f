"""The chart through the real helm: lint, templates, refusals, packaging, and manifests that every Kubernetes takes."""

from __future__ import annotations

import copy
import re
import tarfile

import pytest
import yaml

from tests.chart.chart_support import (
    APIS,
    CHART,
    NEWEST,
    SCENARIOS,
    VERSIONS,
    Loader,
    by_component,
    of_kind,
    problems,
    render,
    run_helm,
    scenario,
    template,
    workloads,
)


@pytest.mark.parametrize("values", [(), ("values-gpu.yaml",)], ids=["default", "gpu"])
def test_lint(values):
    done = run_helm("lint", "--strict", str(CHART), *(f"--values={CHART / name}" for name in values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SCENARIOS)
def test_manifests_are_valid(name):
    """In the newest and the oldest Kubernetes of kubernetes-validate, strictly: no unknown fields."""
    for version in (NEWEST, VERSIONS[0]):
        docs = scenario(name, version=version)
        assert [problem for doc in docs for problem in problems(doc, version)] == []


@pytest.mark.parametrize("version", VERSIONS[1:-1])
def test_everything_is_valid_in_between(version):
    docs = scenario("everything", version=version)
    assert len(docs) > 20
    assert [problem for doc in docs for problem in problems(doc, version)] == []


def test_the_check_finds_faults():
    """Of Kubernetes' own kinds, of pods in a LeaderWorkerSet, of kinds that others define, and keys that come twice."""
    with pytest.raises(yaml.YAMLError, match="a key comes twice"):
        yaml.load("a: {b: 1, b: 2}", Loader)
    docs = {doc["kind"]: doc for doc in scenario("everything")}
    deployment = copy.deepcopy(docs["Deployment"])
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["grcp"] = {"port": 1}
    deployment["spec"]["replicas"] = "two"
    assert len(problems(deployment, NEWEST)) == 2
    group = copy.deepcopy(docs["LeaderWorkerSet"])
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["enableServiceLink"] = False
    assert len(problems(group, NEWEST)) == 1
    scaled = copy.deepcopy(docs["ScaledObject"])
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 8
    assert len(problems(scaled, NEWEST)) == 1


def test_objects_have_namespace_and_own_names():
    for name in SCENARIOS:
        docs = [doc for doc in scenario(name) if "-mine" not in doc["metadata"]["name"]]
        names = [(doc["kind"], doc["metadata"]["name"]) for doc in docs]
        assert len(names) == len(set(names)), name
        assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", doc["metadata"]["name"]) for doc in docs), name
        # Server-side apply merges ports by port and protocol: without one Helm 4 fails on an older API server.
        ports = [
            port
            for doc in docs
            for owner in (doc["spec"] if doc["kind"] == "Service" else {}, *_containers(doc))
            for port in owner.get("ports", ())
        ]
        assert all(port["protocol"] == "TCP" for port in ports), name


def _containers(doc):
    return [workload.container for workload in workloads([doc])]


@pytest.mark.parametrize("version", ["1.20.2", "1.23.9"])
def test_clusters_without_grpc_probes(version):
    """Such as the API server that Debian's sources build: TCP probes, and the API versions of that time."""
    for name in ("default", "groups", "hpa", "network-policy"):
        docs = scenario(name, version=version)
        for workload in workloads(docs):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert "grpc" not in workload.container[probe]
                assert workload.container[probe]["tcpSocket"]["port"] in (50061, 50062, 50063)
        is_old = version.startswith("1.20")
        for budget in of_kind(docs, "PodDisruptionBudget"):
            assert budget["apiVersion"] == ("policy/v1beta1" if is_old else "policy/v1")
            assert "unhealthyPodEvictionPolicy" not in budget["spec"]
        for autoscaler in of_kind(docs, "HorizontalPodAutoscaler"):
            assert autoscaler["apiVersion"] == ("autoscaling/v2beta2" if is_old else "autoscaling/v2")


def test_a_cluster_that_is_too_old_is_refused():
    done = template(version="1.19.0")
    assert done.returncode != 0
    assert "kubeVersion" in done.stderr


def test_extra_objects_are_templates():
    names = {doc["metadata"]["name"]: doc for doc in of_kind(scenario("groups"), "ConfigMap")}
    assert names["rel-mine"]["data"] == {"a": "b"}
    assert names["rel-pagewire-text"]["data"] == {"release": "rel"}


def test_large_numbers_stay_whole():
    """YAML's numbers are floats to helm, and 1000000 would come out as 1e+06."""
    settings = {doc["metadata"]["name"]: doc["data"] for doc in of_kind(scenario("groups"), "ConfigMap")}
    assert settings["rel-pagewire-frontend"] == {"PAGEWIRE_FRONTEND_MAX_TOKENS_BEHIND": "1000000"}
    assert settings["rel-pagewire-core"] == {
        "PAGEWIRE_CORE_MAX_NUM_SEQS": "256",
        "PAGEWIRE_CORE_KV_CACHE_MEMORY_BYTES": "2GiB",
        "PAGEWIRE_CORE_ENABLE_PREFIX_CACHING": "false",
        "PAGEWIRE_CORE_LONG_PREFILL_TOKEN_THRESHOLD": "1048576",
    }
    assert "--max-model-len=8192" in by_component(scenario("groups"))["core"].container["args"]


def test_changed_settings_roll_their_pods_only():
    def checksums(value):
        docs = render(sets=(f"core.settings.max_num_seqs={value}", "worker.settings.num_threads=2"))
        return {
            name: workload.pod["metadata"].get("annotations", {}).get("checksum/settings")
            for name, workload in by_component(docs).items()
        }

    before, after = checksums(64), checksums(128)
    assert before["core"] != after["core"]
    assert before["worker"] == after["worker"] is not None
    assert before["frontend"] is None


def test_changed_certificates_roll_their_pods():
    def checksum(*sets):
        annotations = by_component(render(*SCENARIOS["cert-manager"], sets=sets))["frontend"].pod["metadata"][
            "annotations"
        ]
        return annotations["checksum/certificate"]

    assert checksum() != checksum("tls.certManager.extraDnsNames={other.example.com}")


def test_a_new_chart_version_alone_restarts_nothing():
    """A restart costs the load of a model: nothing of the chart's version is in a pod."""
    for workload in workloads(scenario("everything")):
        assert not any("helm.sh" in key or "version" in key for key in workload.labels)


MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


def test_kinds_that_the_cluster_does_not_know_are_left_out():
    """An install must not abort for want of a definition that only watching needs.

    Case: llm-d#2134
    """
    wanted = (
        *("metrics.serviceMonitor.enabled=true", "metrics.alerts.enabled=true", "frontend.autoscaling.enabled=true"),
        *(
            "groups.autoscaling.enabled=true",
            "frontend.grpcRoute.enabled=true",
            "frontend.grpcRoute.parentRefs[0].name=g",
        ),
    )
    docs = render(sets=wanted, apis=())
    assert of_kind(docs, *MONITORS, "ScaledObject", "GRPCRoute") == []
    # Nobody scales, so the numbers must be there.
    assert {workload.component: workload.replicas for workload in workloads(docs)} == {
        "frontend": 2,
        "core": 1,
        "worker": 1,
    }
    known = render(sets=wanted)
    assert len(of_kind(known, "ScaledObject")) == 3
    assert len(of_kind(known, "GRPCRoute")) == len(of_kind(known, "ServiceMonitor")) == 1
    notes = _notes(*(f"--set={value}" for value in wanted))
    assert notes.count("LEFT OUT") == 5


def _notes(*arguments):
    done = run_helm("install", "rel", str(CHART), "--dry-run=client", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_nothing_beyond_kubernetes_unless_asked():
    own = {"apps/v1", "v1", "policy/v1", "networking.k8s.io/v1"}
    assert {doc["apiVersion"] for doc in scenario("default")} <= own
    assert {doc["apiVersion"] for doc in scenario("default")} == {doc["apiVersion"] for doc in render(apis=())}


def test_alerts_and_dashboard_are_the_files():
    docs = scenario("monitoring")
    rules = CHART / "files" / "alerts" / "pagewire.rules.yaml"
    found = of_kind(docs, "PrometheusRule")
    assert len(found) == rules.exists()
    if found:
        assert found[0]["spec"] == yaml.safe_load(rules.read_text())
    dashboard = CHART / "files" / "dashboards" / "pagewire.json"
    found = [doc for doc in of_kind(docs, "ConfigMap") if doc["metadata"]["name"] == "rel-pagewire-dashboard"]
    assert len(found) == dashboard.exists()
    if found:
        assert found[0]["data"]["pagewire.json"].strip() == dashboard.read_text().strip()
        assert found[0]["metadata"]["labels"]["grafana_dashboard"] == "1"


REFUSED = {
    "replicas of 0": ("groups.replicas=0", "'/groups/replicas': minimum: got 0, want 1"),
    "unknown value": ("frontend.replcas=3", "additional properties 'replcas' not allowed"),
    "unknown section": ("forntend.replicas=3", "additional properties 'forntend' not allowed"),
    "wrong type": ("frontend.service.port=abc", "'/frontend/service/port': got string, want integer"),
    "not of the list": ("logFormat=xml", "'/logFormat': value must be one of 'json', 'text'"),
    "a tag that moves": ("worker.image.tag=latest", "'/worker/image/tag': 'not' failed"),
    "a setting's bound": (
        "core.settings.block_size=4096",
        "'/core/settings/block_size': maximum: got 4,096, want 1,024",
    ),
    "a setting's choice": (
        "core.settings.policy=lifo",
        "'/core/settings/policy': value must be one of 'fcfs', 'priority'",
    ),
    "a setting that is none": ("core.settings.max_seqs=1", "additional properties 'max_seqs' not allowed"),
    "a setting that the chart sets": ("core.settings.port=1", "additional properties 'port' not allowed"),
    "a token in values": ("hf.token=hf_x", "additional properties 'token' not allowed"),
    "a long name": ("fullnameOverride=" + 40 * "x", "'/fullnameOverride': maxLength: got 40, want 36"),
    "a short margin": ("terminationMarginSeconds=5", "'/terminationMarginSeconds': minimum: got 5, want 10"),
    "one claim for several": (
        "groups.replicas=2,model.cache.create=true",
        "need model.cache.accessModes=[ReadWriteMany]",
    ),
    "TLS of nothing": ("tls.enabled=true", "tls.enabled needs tls.existingSecret, tls.secrets."),
    "no issuer": ("tls.enabled=true,tls.certManager.enabled=true", "needs tls.certManager.issuerRef.name"),
    "read-only emptiness": ("model.cache.readOnly=true", "needs model.cache.existingClaim"),
    "scaling a list": (
        "groups.autoscaling.enabled=true,frontend.coreDiscovery=list",
        "needs frontend.coreDiscovery=dns",
    ),
    "counting twice": (
        "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true",
        "would count everything twice",
    ),
    "monitors of nothing": ("metrics.podMonitor.enabled=true,metrics.enabled=false", "need metrics.enabled"),
    "more least than most": ("frontend.autoscaling.minReplicas=11", "minReplicas=11 is above maxReplicas=10"),
    "Ingress without host": ("frontend.ingress.enabled=true", "needs frontend.ingress.host"),
    "GRPCRoute without gateway": ("frontend.grpcRoute.enabled=true", "needs frontend.grpcRoute.parentRefs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_values_are_refused(what):
    sets, message = REFUSED[what]
    done = template(sets=tuple(sets.split(",")))
    assert done.returncode == 1
    assert message in done.stderr


def test_what_a_cluster_must_have_is_asked_for():
    """Without these no pod would start: better no install than half of one."""
    without = {
        "cert-manager": "does not know cert-manager.io/v1 Certificate",
        "leader-worker-set": "does not know leaderworkerset.x-k8s.io/v1 LeaderWorkerSet",
    }
    for name, message in without.items():
        done = template(*SCENARIOS[name], apis=())
        assert done.returncode == 1
        assert message in done.stderr
    done = template(sets=("core.preStopSleepSeconds=5",), version="1.29.0")
    assert "core.preStopSleepSeconds needs Kubernetes 1.30" in done.stderr


def test_package(tmp_path):
    """What is shipped: no values of the tests, and it renders as the folder does."""
    done = run_helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("pagewire-*.tgz")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    assert "pagewire/values.schema.json" in names and "pagewire/README.md" in names
    assert "pagewire/values-gpu.yaml" in names
    assert not any("/ci/" in name for name in names)
    done = run_helm("template", "rel", str(archive), "--namespace", "inference", "--kube-version", NEWEST)
    assert done.returncode == 0, done.stderr
    assert [doc for doc in yaml.safe_load_all(done.stdout) if doc] == render(apis=())


def test_as_a_dependency(tmp_path):
    """helm hands `global` to a dependency, which a strict schema has to bear."""
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: parent\nversion: 0.1.0\n")
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "pagewire").symlink_to(CHART)
    (tmp_path / "values.yaml").write_text("global: {x: 1}\npagewire: {groups: {replicas: 2}}\n")
    done = run_helm("template", "rel", str(tmp_path), "--kube-version", NEWEST)
    assert done.returncode == 0, done.stderr
    docs = [doc for doc in yaml.safe_load_all(done.stdout) if doc]
    assert by_component(docs)["core"].replicas == 2


def test_notes():
    notes = _notes()
    assert "rel-pagewire-frontend.default.svc.cluster.local:50051" in notes
    assert "helm -n default test rel" in notes
    assert "LEFT OUT" not in notes
    tls = _notes(f"--values={CHART / 'ci/tls-secret-values.yaml'}")
    assert "plaintext" not in tls and "-cacert ca.crt -cert tls.crt" in tls


def test_every_kind_that_may_be_missing_is_rendered_somewhere():
    rendered = {f"{doc['apiVersion']}/{doc['kind']}" for name in SCENARIOS for doc in scenario(name)}
    unproven = set(APIS) - rendered - {"external.metrics.k8s.io/v1beta1"}
    if not (CHART / "files/alerts/pagewire.rules.yaml").exists():
        unproven -= {"monitoring.coreos.com/v1/PrometheusRule"}
    assert unproven == set()
