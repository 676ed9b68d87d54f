"""Who finds whom and who may talk to whom: Services, names, certificates, and a model of NetworkPolicies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.chart.chart_support import (
    NAMESPACE,
    SCENARIOS,
    Workload,
    by_component,
    flag,
    of_kind,
    scenario,
    selects,
    workloads,
)

DOMAIN = f"{NAMESPACE}.svc.cluster.local"
PORTS = {"frontend": 50051, "core": 50052, "worker": 50053}
every_scenario = pytest.mark.parametrize("name", SCENARIOS)


@every_scenario
def test_services_find_pods_and_ports(name):
    docs = scenario(name)
    for service in of_kind(docs, "Service"):
        selected = [w for w in workloads(docs) if selects({"matchLabels": service["spec"]["selector"]}, w.labels)]
        assert len(selected) == 1, service["metadata"]["name"]
        ports = {port["name"]: port["containerPort"] for port in selected[0].container["ports"]}
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
        if service["spec"].get("clusterIP") == "None":
            # A headless Service maps no ports: what clients dial is the pod's.
            assert all(port["port"] == ports[port["targetPort"]] for port in service["spec"]["ports"])
        else:
            assert selected[0].component == "frontend", "balancing by connection stands in front of frontends only"
            assert [port["name"] for port in service["spec"]["ports"]] == ["grpc"], "metrics are not for clients"


def resolve(docs, host):
    """Workloads and indices behind a name of the cluster's DNS; (workload, None) for all of a headless Service."""
    name = host.removesuffix(f".{DOMAIN}")
    assert name != host, f"{host} is no whole name"
    pod, _, service = name.rpartition(".")
    if not pod:
        (found,) = [doc for doc in of_kind(docs, "Service") if doc["metadata"]["name"] == service]
        selector = {"matchLabels": found["spec"]["selector"]}
        return [(workload, None) for workload in workloads(docs) if selects(selector, workload.labels)]
    # A pod has a name where its subdomain is a headless Service; a LeaderWorkerSet's is made by its controller.
    headless = {d["metadata"]["name"] for d in of_kind(docs, "Service") if d["spec"].get("clusterIP") == "None"}
    headless |= {doc["metadata"]["name"] for doc in of_kind(docs, "LeaderWorkerSet")}
    assert service in headless
    return [
        (workload, index)
        for workload in workloads(docs)
        for index in range(workload.replicas or 5)
        if workload.subdomain == service and workload.pod_name.format(i=index) == pod
    ]


@every_scenario
def test_every_core_finds_its_own_worker(name):
    """Core i is given worker i: as the kubelet writes its arguments, with its pod's name and no shell."""
    docs = scenario(name)
    core, worker = by_component(docs)["core"], by_component(docs)["worker"]
    assert core.replicas == worker.replicas
    for index in range(core.replicas or 5):
        address = flag(core, "--worker").replace("$(POD_NAME)", core.pod_name.format(i=index))
        host, _, port = address.rpartition(":")
        assert resolve(docs, host) == [(worker, index)]
        assert int(port) == PORTS["worker"]


@every_scenario
def test_frontends_find_all_cores(name):
    docs = scenario(name)
    found = by_component(docs)
    target = flag(found["frontend"], "--core")
    if target.startswith("dns:///"):
        host, _, port = target.removeprefix("dns:///").rpartition(":")
        assert resolve(docs, host) == [(found["core"], None)]
        assert int(port) == PORTS["core"]
    else:
        addresses = target.split(",")
        reached = [resolve(docs, address.rpartition(":")[0]) for address in addresses]
        assert reached == [[(found["core"], index)] for index in range(found["core"].replicas)]
        assert {address.rpartition(":")[2] for address in addresses} == {"50052"}


@every_scenario
def test_names_of_pods_resolve_before_and_after_they_are_ready(name):
    for service in of_kind(scenario(name), "Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        assert service["spec"].get("publishNotReadyAddresses", False) == (component != "frontend")


@every_scenario
def test_certificates_cover_what_is_dialled(name):
    docs = scenario(name)
    certificates = {doc["spec"]["secretName"]: doc["spec"] for doc in of_kind(docs, "Certificate")}
    if not certificates:
        return
    found = by_component(docs)
    dialled = {
        "core": flag(found["frontend"], "--core").removeprefix("dns:///").split(",")[0],
        "worker": flag(found["core"], "--worker").replace("$(POD_NAME)", found["core"].pod_name.format(i=0)),
    }
    for pod in of_kind(docs, "Pod"):
        dialled["frontend"] = pod["spec"]["containers"][0]["args"][0].partition("=")[2]
    for component, address in dialled.items():
        volumes = {volume["name"]: volume for volume in found[component].spec["volumes"]}
        names = certificates[volumes["tls"]["secret"]["secretName"]]["dnsNames"]
        host = address.rpartition(":")[0]
        assert host in names or f"*.{host.partition('.')[2]}" in names
    for spec in certificates.values():
        assert set(spec["usages"]) == {"server auth", "client auth"}


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod by its labels, and those of its namespace."""

    labels: dict[str, str]
    namespace: dict[str, str]


def peer(workload: Workload, namespace: str = NAMESPACE) -> Peer:
    return Peer(workload.labels, {"kubernetes.io/metadata.name": namespace})


OUTSIDE = Peer({}, {"kubernetes.io/metadata.name": "elsewhere"})
CLIENT = Peer({"app": "client"}, {"kubernetes.io/metadata.name": "clients"})
PROMETHEUS = Peer({"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
COLLECTOR = Peer({"app": "collector"}, {"kubernetes.io/metadata.name": "observability"})
NEIGHBOUR = Peer({"app": "neighbour"}, {"kubernetes.io/metadata.name": NAMESPACE})
STRANGERS = (CLIENT, OUTSIDE, NEIGHBOUR)


def allows(docs, source, target, port, protocol="TCP"):
    """Whether NetworkPolicies let a connection through: each end that policies select must have a rule for it."""
    for direction, end, other, key in (("Ingress", target, source, "from"), ("Egress", source, target, "to")):
        policies = [
            doc["spec"]
            for doc in of_kind(docs, "NetworkPolicy")
            if end.namespace["kubernetes.io/metadata.name"] == NAMESPACE
            and direction in doc["spec"]["policyTypes"]
            and selects(doc["spec"]["podSelector"], end.labels)
        ]
        rules = [rule for spec in policies for rule in spec.get(direction.lower(), ())]
        if policies and not any(_rule_allows(rule, key, other, port, protocol) for rule in rules):
            return False
    return True


def _rule_allows(rule, key, other, port, protocol):
    ports = rule.get("ports")
    if ports and not any(p["port"] == port and p["protocol"] == protocol for p in ports):
        return False
    return key not in rule or any(_peer_matches(entry, other) for entry in rule[key])


def _peer_matches(entry, other):
    if "namespaceSelector" in entry:
        if not selects(entry["namespaceSelector"], other.namespace):
            return False
    elif other.namespace["kubernetes.io/metadata.name"] != NAMESPACE:
        return False
    return selects(entry.get("podSelector", {}), other.labels)


METRICS = {"frontend": 9101, "core": 9102, "worker": 9103}


@pytest.mark.parametrize("name", ["default", "network-policy", "everything"])
def test_network_policies_allow_what_is_needed_and_nothing_else(name):
    docs = scenario(name)
    ends = {workload.component: peer(workload) for workload in workloads(docs, with_tests=True)}
    other = {w.component: peer(w) for w in workloads(scenario(name, release="other"), with_tests=True)}
    frontend, core, worker = ends["frontend"], ends["core"], ends["worker"]
    needed = [
        (frontend, core, 50052),
        (core, worker, 50053),
        (CLIENT, frontend, 50051),
        (ends["test"], frontend, 50051),
    ]
    needed += [(PROMETHEUS, ends[tier], port) for tier, port in METRICS.items()]
    needed += [(worker, OUTSIDE, 443)]
    assert [edge for edge in needed if not allows(docs, *edge)] == []
    forbidden = [
        *[(source, core, 50052) for source in (*STRANGERS, worker, core, ends["test"], other["frontend"])],
        *[(source, worker, 50053) for source in (*STRANGERS, frontend, worker, other["core"])],
        *[(PROMETHEUS, ends[tier], port) for tier, port in PORTS.items() if tier != "frontend"],
        *[(CLIENT, ends[tier], port + 10) for tier, port in PORTS.items()],
    ]
    if name != "default":
        forbidden += [(source, frontend, 50051) for source in (OUTSIDE, NEIGHBOUR, PROMETHEUS, core, other["test"])]
        forbidden += [(CLIENT, ends[tier], port) for tier, port in METRICS.items()]
        forbidden += [(end, OUTSIDE, 443) for end in (frontend, core)]
        forbidden += [(frontend, worker, 50053), (frontend, other["core"], 50052), (ends["test"], OUTSIDE, 443)]
        assert all(allows(docs, end, OUTSIDE, 53, protocol) for end in ends.values() for protocol in ("UDP", "TCP"))
        otlp = 4317
        assert all(allows(docs, ends[tier], COLLECTOR, otlp) for tier in PORTS)
        assert not allows(docs, ends["test"], COLLECTOR, otlp)
    assert [edge for edge in forbidden if allows(docs, *edge)] == []


def test_the_model_of_network_policies_notices():
    """Without policies everything passes; without one of them its tier is open."""
    docs = scenario("default")
    core, client = peer(by_component(docs)["core"]), CLIENT
    assert not allows(docs, client, core, 50052)
    fewer = [doc for doc in docs if doc["metadata"]["name"] != "rel-pagewire-core" or doc["kind"] != "NetworkPolicy"]
    assert allows(fewer, client, core, 50052)
    assert allows(scenario("minimal"), client, core, 50052)
