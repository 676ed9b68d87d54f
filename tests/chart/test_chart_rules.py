"""What every manifest of the chart keeps to: security, probes, drain, names that resolve, budgets, policies."""

from __future__ import annotations

import re

import pytest

from tests.chart.chart_support import (
    NAMESPACE,
    ROOT,
    SCENARIOS,
    SELECTOR_KEYS,
    by_component,
    flag,
    of_kind,
    render,
    scenario,
    selects,
    workloads,
)

PORTS = {"frontend": 50051, "core": 50052, "worker": 50053}
every_scenario = pytest.mark.parametrize("name", SCENARIOS)


@every_scenario
def test_pods_have_no_rights(name):
    for workload in workloads(scenario(name), with_tests=True):
        spec, pod = workload.spec, workload.spec["securityContext"]
        assert pod["runAsNonRoot"] is True and pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 10001
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not any("hostPath" in volume for volume in spec.get("volumes", ()))
        container = workload.container["securityContext"]
        assert container["allowPrivilegeEscalation"] is container["privileged"] is False
        assert container["readOnlyRootFilesystem"] is True
        assert container["capabilities"]["drop"] == ["ALL"]
        assert "command" not in workload.container or workload.owner.startswith("Pod/")


@every_scenario
def test_containers_say_what_they_take(name):
    for workload in workloads(scenario(name), with_tests=True):
        resources, image = workload.container["resources"], workload.container["image"]
        assert set(resources["requests"]) >= {"cpu", "memory"} and "memory" in resources["limits"]
        # A limit on CPU would throttle the whole process group for its busiest moment.
        assert "cpu" not in resources["limits"]
        assert re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", image), image
        assert str(resources["limits"].get("nvidia.com/gpu")) == str(resources["requests"].get("nvidia.com/gpu"))


@every_scenario
def test_what_is_written_to_is_a_volume(name):
    """The root file system is read-only: every folder that a variable names lies in a mount of a volume."""
    for workload in workloads(scenario(name), with_tests=True):
        mounts = {mount["mountPath"]: mount for mount in workload.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
        assert len(volumes) == len(workload.spec["volumes"])
        assert {mount["name"] for mount in mounts.values()} == set(volumes)
        assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
        for variable in workload.container["env"]:
            value = variable.get("value", "")
            if value.startswith("/"):
                assert any(value == path or value.startswith(f"{path}/") for path in mounts), variable
        for argument in workload.container["args"]:
            if argument.startswith(("--tls-", "--api-keys-file")):
                assert any(argument.partition("=")[2].startswith(f"{path}/") for path in mounts), argument


@every_scenario
def test_probes(name):
    """Loading a model is no reason for a restart, and a pod is ready only when a request can be served.

    Case: kserve#5062
    """
    for workload in workloads(scenario(name)):
        container = workload.container
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        for probe in probes.values():
            assert probe["grpc"]["port"] == ports["health"] == int(flag(workload, "--health-port"))
            assert probe["timeoutSeconds"] > 1
        assert probes["readiness"]["grpc"]["service"] == "readiness"
        assert probes["liveness"]["grpc"]["service"] == "liveness"
        seconds = probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"]
        if workload.component == "core":
            # Its own time-out comes first: it knows the reason, and the kubelet does not.
            assert probes["startup"]["grpc"]["service"] == "readiness"
            assert seconds >= int(flag(workload, "--startup-timeout-s")) + 60
        else:
            assert probes["startup"]["grpc"]["service"] == "liveness"
            assert seconds >= 60
        assert flag(workload, "--health-host") == "0.0.0.0", "the kubelet asks at the pod's address"


def test_time_to_load_comes_from_values():
    core = by_component(render(sets=("model.loadSeconds=1801", "core.probes.startup.periodSeconds=7")))["core"]
    assert core.container["startupProbe"]["failureThreshold"] == 266
    assert flag(core, "--startup-timeout-s") == "1801"


def test_strategies():
    """One that rolls takes numbers, and one that does not is refused with them by the API server."""
    (deployment,) = of_kind(scenario("groups"), "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    (deployment,) = of_kind(scenario("default"), "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@every_scenario
def test_a_rollout_has_not_failed_while_a_model_loads(name):
    """Frontends wait for a core: Kubernetes' ten minutes would call every rollout with a large model a failure."""
    docs = scenario(name)
    (deployment,) = of_kind(docs, "Deployment")
    load_s = int(flag(by_component(docs)["core"], "--startup-timeout-s"))
    assert deployment["spec"]["progressDeadlineSeconds"] > load_s + 60


@every_scenario
def test_grace_covers_the_drain(name):
    """SIGKILL comes after lame duck, drain and what a process needs to end; a worker outlasts its core."""
    found = by_component(scenario(name))
    lame_duck = {key: int(flag(workload, "--lame-duck-s")) for key, workload in found.items()}
    drain = {key: int(flag(workload, "--drain-s")) for key, workload in found.items()}
    for key, workload in found.items():
        assert workload.spec["terminationGracePeriodSeconds"] >= lame_duck[key] + drain[key] + 10
    # Balancers need to hear that it is not ready: two failures of the readiness probe.
    probe = found["frontend"].container["readinessProbe"]
    assert lame_duck["frontend"] >= probe["periodSeconds"] * probe["failureThreshold"]
    assert drain["worker"] >= lame_duck["core"] + drain["core"] + 9


def test_grace_follows_values():
    sets = (
        "core.lameDuckSeconds=7",
        "core.drainSeconds=300",
        "core.preStopSleepSeconds=5",
        "terminationMarginSeconds=20",
    )
    found = by_component(render(sets=sets))
    assert found["core"].spec["terminationGracePeriodSeconds"] == 7 + 300 + 5 + 20
    assert found["core"].container["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert flag(found["worker"], "--drain-s") == "317"
    assert found["worker"].spec["terminationGracePeriodSeconds"] == 317 + 20
    assert "lifecycle" not in found["frontend"].container
    own = by_component(render(sets=("worker.drainSeconds=0",)))["worker"]
    assert flag(own, "--drain-s") == "0"


@every_scenario
def test_selectors_are_the_three_labels(name):
    """They can't change after an install, so nothing that may change is in them."""
    for doc in scenario(name):
        spec = doc.get("spec", {})
        selectors = []
        if doc["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            selectors.append(spec["selector"]["matchLabels"])
        if doc["kind"] == "Service":
            selectors.append(spec["selector"])
        if doc["kind"] == "NetworkPolicy":
            selectors.append(spec["podSelector"]["matchLabels"])
        assert all(set(selector) == SELECTOR_KEYS for selector in selectors), doc["metadata"]["name"]
    for workload in workloads(scenario(name), with_tests=True):
        assert workload.labels["app.kubernetes.io/name"] == "pagewire"
        assert workload.labels["app.kubernetes.io/instance"] == "rel"
        assert workload.labels["app.kubernetes.io/component"] in (*PORTS, "test")


def least(docs, workload):
    """The fewest pods that a workload has."""
    if workload.replicas is not None:
        return workload.replicas
    kind, _, name = workload.owner.partition("/")
    for doc in of_kind(docs, "ScaledObject", "HorizontalPodAutoscaler"):
        target = doc["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) == (kind, name):
            return doc["spec"].get("minReplicaCount", doc["spec"].get("minReplicas"))
    raise AssertionError(f"nobody scales {workload.owner}")


@every_scenario
def test_budgets_are_there_where_there_is_more_than_one(name):
    """And each selects the pods that it is for: one that selects none does nothing, one for a single pod blocks nodes.

    Case: production-stack#840
    """
    docs = scenario(name)
    budgets = of_kind(docs, "PodDisruptionBudget")
    for workload in workloads(docs):
        selecting = [doc for doc in budgets if selects(doc["spec"]["selector"], workload.labels)]
        assert len(selecting) == (least(docs, workload) > 1), workload.owner
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert sum(selects(budget["spec"]["selector"], workload.labels) for workload in workloads(docs)) == 1


def test_budgets_can_be_turned_off():
    docs = render(sets=("frontend.pdb.enabled=false",))
    assert of_kind(docs, "PodDisruptionBudget") == []


@every_scenario
def test_scalers_have_targets(name):
    """Queue and KV use, never the processor; replicas are not in what an upgrade would set back."""
    docs = scenario(name)
    scalers = of_kind(docs, "ScaledObject", "HorizontalPodAutoscaler")
    owners = {workload.owner: workload for workload in workloads(docs)}
    targets = [f"{s['spec']['scaleTargetRef']['kind']}/{s['spec']['scaleTargetRef']['name']}" for s in scalers]
    assert len(set(targets)) == len(targets)
    assert set(targets) == {owner for owner, workload in owners.items() if workload.replicas is None}
    for scaler in scalers:
        assert "cpu" not in str(scaler["spec"])
        assert "pagewire_" in str(scaler["spec"])


@pytest.mark.parametrize("name", ["keda", "hpa"])
def test_a_worker_goes_after_its_core(name):
    """Cores and workers scale on the same signals; a worker that went first would cut its core's streams."""
    docs = scenario(name)
    scalers = of_kind(docs, "ScaledObject" if name == "keda" else "HorizontalPodAutoscaler")
    found = {scaler["metadata"]["labels"]["app.kubernetes.io/component"]: scaler["spec"] for scaler in scalers}

    def parts(spec):
        if name == "keda":
            config = spec["advanced"]["horizontalPodAutoscalerConfig"]
            return spec["triggers"], config["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
        return spec["metrics"], spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"]

    core_signals, core_wait = parts(found["core"])
    worker_signals, worker_wait = parts(found["worker"])
    assert core_signals == worker_signals and len(core_signals) == 2
    grace = by_component(docs)["core"].spec["terminationGracePeriodSeconds"]
    assert worker_wait >= core_wait + grace
    for bound in ("minReplicaCount", "maxReplicaCount", "minReplicas", "maxReplicas"):
        assert found["core"].get(bound) == found["worker"].get(bound)


def test_queries_are_of_this_release_alone():
    """By labels that the monitors put on every series, and with metrics that are documented."""
    documented = ROOT / "docs" / "metrics.md"
    for docs in (scenario("keda"), scenario("everything")):
        queries = [t["metadata"]["query"] for doc in of_kind(docs, "ScaledObject") for t in doc["spec"]["triggers"]]
        assert len(queries) >= 3
        for query in queries:
            assert f'{{namespace="{NAMESPACE}",app_kubernetes_io_instance="rel"}}' in query
            if documented.exists():
                (metric,) = re.findall(r"pagewire_\w+", query)
                assert f"`{metric}`" in documented.read_text()
    for name, kind, field in (("monitoring", "ServiceMonitor", "target"), ("everything", "PodMonitor", "podTarget")):
        (monitor,) = of_kind(scenario(name), kind)
        assert set(monitor["spec"][f"{field}Labels"]) == SELECTOR_KEYS


@pytest.mark.parametrize("name", ["monitoring", "everything"])
def test_monitors_find_every_pod_once(name):
    docs = scenario(name)
    found = {workload.component: 0 for workload in workloads(docs)}
    for monitor in of_kind(docs, "PodMonitor"):
        assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
        for workload in workloads(docs, with_tests=True):
            if selects(monitor["spec"]["selector"], workload.labels):
                found[workload.component] += 1
    for monitor in of_kind(docs, "ServiceMonitor"):
        for service in of_kind(docs, "Service"):
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"]):
                assert "metrics" in [port["name"] for port in service["spec"]["ports"]]
                found[service["spec"]["selector"]["app.kubernetes.io/component"]] += 1
    assert found == {"frontend": 1, "core": 1, "worker": 1}


def test_secrets_are_named_and_never_made():
    """No value holds a token, a key or a password."""
    for name in SCENARIOS:
        assert of_kind(scenario(name), "Secret") == []
    found = by_component(scenario("existing"))
    (token,) = [v for v in found["worker"].container["env"] if v["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hf-token", "key": "token"}}
    (keys,) = [v for v in found["frontend"].spec["volumes"] if v["name"] == "api-keys"]
    assert keys["secret"]["secretName"] == "pagewire-api-keys"
    assert flag(found["frontend"], "--api-keys-file") == "/etc/pagewire/api-keys/api-keys"
    for other in ("frontend", "core"):
        assert "HF_TOKEN" not in [variable["name"] for variable in found[other].container["env"]]


def test_claims():
    worker = by_component(scenario("existing"))["worker"]
    (models,) = [volume for volume in worker.spec["volumes"] if volume["name"] == "models"]
    assert models == {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    assert of_kind(scenario("existing"), "PersistentVolumeClaim") == []
    (claim,) = of_kind(scenario("groups"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    worker = by_component(scenario("groups"))["worker"]
    mounts = {mount["mountPath"]: mount for mount in worker.container["volumeMounts"]}
    assert mounts["/var/cache/pagewire/kernels"]["name"] == mounts["/var/cache/pagewire/models"]["name"] == "models"
    assert mounts["/var/cache/pagewire/kernels"]["subPath"] == "kernels"


@every_scenario
def test_spread_counts_the_own_tier(name):
    for workload in workloads(scenario(name)):
        for constraint in workload.spec.get("topologySpreadConstraints", ()):
            selector = constraint["labelSelector"]
            assert selects(selector, workload.labels) or "mine" in selector["matchLabels"]
