"""Releases side by side, and a release over its upgrades."""

from __future__ import annotations

import copy
import itertools

import pytest

from tests.chart.chart_support import SCENARIOS, by_component, dumped, of_kind, render, scenario, selects, workloads

LONG = "a-release-whose-name-is-as-long-as-helm-lets-one-be-"
PAIRS = [
    ("a", "b"),
    # Names that are beginnings of each other, and of the chart's own names.
    ("pagewire", "pagewire-core"),
    ("pagewire", "pagewire-frontend"),
    ("pagewire-core", "pagewire-frontend"),
    (LONG + "a", LONG + "b"),
]


def selectors(docs):
    """(who selects, what it selects: a selector of pods, or of Services)."""
    for doc in docs:
        name, spec = f"{doc['kind']}/{doc['metadata']['name']}", doc.get("spec", {})
        match doc["kind"]:
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget" | "PodMonitor":
                yield name, "pods", spec["selector"]
            case "Service":
                yield name, "pods", {"matchLabels": spec["selector"]}
            case "ServiceMonitor":
                yield name, "services", spec["selector"]
            case "NetworkPolicy":
                yield name, "pods", spec["podSelector"]
                for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
                    for entry in (*rule.get("from", ()), *rule.get("to", ())):
                        if "podSelector" in entry:
                            yield name, "pods", entry["podSelector"]
    for workload in workloads(docs):
        for constraint in workload.spec.get("topologySpreadConstraints", ()):
            yield workload.owner, "pods", constraint["labelSelector"]


@pytest.mark.parametrize("first,second", PAIRS, ids=lambda name: name[-18:])
@pytest.mark.parametrize("name", ["keda", "everything"])
def test_two_releases_in_one_namespace_do_not_meet(name, first, second):
    """Neither by an object's name nor by a selector of a Service, budget, policy, monitor or workload.

    Case: vllm#37942
    """
    one, two = scenario(name, release=first), scenario(name, release=second)
    names = [{(doc["kind"], doc["metadata"]["name"]) for doc in docs} for docs in (one, two)]
    assert names[0] & names[1] == set()
    for docs, others in ((one, two), (two, one)):
        labels = {
            "pods": [workload.labels for workload in workloads(others, with_tests=True)],
            "services": [doc["metadata"]["labels"] for doc in of_kind(others, "Service")],
        }
        for who, kind, selector in selectors(docs):
            assert not any(selects(selector, found) for found in labels[kind]), who
    assert sum(1 for _ in selectors(one)) > 10


def test_names_fit():
    """A pod's name is a label, and a StatefulSet puts a hash behind its own: 63 characters in all."""
    for release in (LONG + "a", "x"):
        for name in ("groups", "everything"):
            for workload in workloads(scenario(name, release=release)):
                assert len(workload.pod_name.format(i=999)) <= 63
                if not workload.owner.startswith("Deployment/"):
                    assert len(workload.pod_name.format(i=99).removesuffix("-99")) <= 63 - 11
            assert all(len(doc["metadata"]["name"]) <= 63 for doc in scenario(name, release=release))


MUTABLE = {
    "StatefulSet": {
        *("replicas", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy", "minReadySeconds"),
        *("ordinals", "revisionHistoryLimit"),
    },
    # Size, class and modes of a claim are what the user asked for; the README says how to change them.
    "PersistentVolumeClaim": {"resources", "accessModes", "storageClassName"},
}


def immutable(doc):
    """What the API server does not let change in an object; None where everything may."""
    spec = copy.deepcopy(doc.get("spec", {}))
    match doc["kind"]:
        case "Deployment":
            return spec["selector"]
        case "Service":
            return spec.get("clusterIP")
        case "StatefulSet" | "PersistentVolumeClaim":
            return {key: value for key, value in spec.items() if key not in MUTABLE[doc["kind"]]}
        case "LeaderWorkerSet":
            return [spec["leaderWorkerTemplate"]["size"], spec["networkConfig"]]
        case "ConfigMap":
            return doc.get("immutable")
    return None


def test_upgrades_change_nothing_that_can_not_change():
    """From any of the values sets to any other: an upgrade that the API server refuses helps nobody."""
    found = {name: {(d["kind"], d["metadata"]["name"]): immutable(d) for d in scenario(name)} for name in SCENARIOS}
    num_compared = 0
    for one, two in itertools.combinations(SCENARIOS, 2):
        for key in set(found[one]) & set(found[two]):
            assert dumped(found[one][key]) == dumped(found[two][key]), f"{one} to {two}: {key}"
            num_compared += 1
    assert num_compared > 500


def test_upgrades_keep_the_selectors_of_all_versions():
    """These were in the first release: a change of them can't be rolled out."""
    docs = scenario("default")
    (deployment,) = of_kind(docs, "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "pagewire",
        "app.kubernetes.io/instance": "rel",
        "app.kubernetes.io/component": "frontend",
    }
    assert {(doc["metadata"]["name"], doc["spec"]["serviceName"]) for doc in of_kind(docs, "StatefulSet")} == {
        ("rel-pagewire-core", "rel-pagewire-core"),
        ("worker-of-rel-pagewire-core", "rel-pagewire-worker"),
    }
    assert {doc["spec"]["podManagementPolicy"] for doc in of_kind(docs, "StatefulSet")} == {"Parallel"}


def test_more_groups_restart_no_core_and_no_frontend():
    """With DNS, scaling changes numbers and no pod; with a list the frontends roll."""
    before, after = by_component(render()), by_component(render(sets=("groups.replicas=4",)))
    assert all(before[tier].pod == after[tier].pod for tier in before)
    listed = [by_component(render(sets=(f"groups.replicas={n}", "frontend.coreDiscovery=list"))) for n in (1, 4)]
    assert listed[0]["frontend"].pod != listed[1]["frontend"].pod
    assert listed[0]["core"].pod == listed[1]["core"].pod


def test_labels_of_users_do_not_replace_ours():
    """Labels that others gave to everything, and to pods, must not take pods out of their selectors."""
    docs = scenario("groups")
    for doc in docs:
        if "-mine" not in doc["metadata"]["name"] and "-text" not in doc["metadata"]["name"]:
            assert doc["metadata"]["labels"]["team"] == "inference"
            assert doc["metadata"]["labels"]["app.kubernetes.io/name"] == "pagewire"
    assert by_component(docs)["core"].labels["tier"] == "brain"
