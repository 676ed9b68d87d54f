"""Renders the chart with the real helm, and knows what Kubernetes would make of the result."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import kubernetes_validate.utils as kubernetes
import referencing
import referencing.jsonschema
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "chart"
TOOLS = ROOT / "k8s" / "tools"
NAMESPACE = "inference"
VERSIONS = list(dict.fromkeys(kubernetes.major_minor(version) for version in kubernetes.all_versions()))
"""What kubernetes-validate has schemas of, such as 1.25 … 1.37."""
NEWEST = VERSIONS[-1]
APIS = (
    "cert-manager.io/v1/Certificate",
    "external.metrics.k8s.io/v1beta1",
    "gateway.networking.k8s.io/v1/GRPCRoute",
    "keda.sh/v1alpha1/ScaledObject",
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "monitoring.coreos.com/v1/ServiceMonitor",
)
"""Kinds beyond Kubernetes' own that the chart may use."""
SELECTOR_KEYS = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
TIERS = ("frontend", "core", "worker")

SCENARIOS: dict[str, tuple[str, ...]] = {"default": (), "gpu": ("values-gpu.yaml",)} | {
    path.name.removesuffix("-values.yaml"): (f"ci/{path.name}",) for path in sorted((CHART / "ci").glob("*.yaml"))
}
"""Values files by name; rendered with all of APIS."""

Doc = dict[str, Any]


def tool(name: str) -> ModuleType:
    """A module of k8s/tools, which are scripts and no package."""
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    return importlib.import_module(name)


@functools.cache
def helm_path() -> Path:
    return Path(tool("get_helm").helm())


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """helm with folders of its own, so that a user's settings and plugins do not count."""
    with tempfile.TemporaryDirectory(prefix="pagewire-helm.") as home:
        names = ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
        environ = {name: f"{home}/{name}" for name in names} | {"HOME": home, "KUBECONFIG": "/nonexistent"}
        return subprocess.run(
            [helm_path(), *arguments], capture_output=True, text=True, env=environ, timeout=60, check=False
        )


def template(
    *files: str, sets: tuple[str, ...] = (), apis: tuple[str, ...] = APIS, version: str = NEWEST, release: str = "rel"
) -> subprocess.CompletedProcess[str]:
    """`helm template` with values files of the chart's folder and --set arguments."""
    command = ["template", release, str(CHART), "--namespace", NAMESPACE, "--kube-version", version]
    command += [part for file in files for part in ("--values", str(CHART / file))]
    command += [part for value in sets for part in ("--set", value)]
    if apis:
        command += ["--api-versions", ",".join(apis)]
    return run_helm(*command)


def render(*files: str, **options: Any) -> list[Doc]:
    """The objects, from one run of helm for equal arguments: not to be changed."""
    return list(_rendered(*files, **options))


@functools.cache
def _rendered(*files: str, **options: Any) -> tuple[Doc, ...]:
    done = template(*files, **options)
    assert done.returncode == 0, done.stderr
    return tuple(doc for doc in yaml.load_all(done.stdout, Loader) if doc)


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """In C where it can be, a tenth of the time; a key that comes twice is an error, as it is to the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) != len(node.value):
            raise yaml.YAMLError(f"a key comes twice: {[key.value for key, _ in node.value]} {node.start_mark}")
        return dict(found)


def scenario(name: str, **options: Any) -> list[Doc]:
    return render(*SCENARIOS[name], **options)


def of_kind(docs: list[Doc], *kinds: str) -> list[Doc]:
    return [doc for doc in docs if doc["kind"] in kinds]


@dataclass(frozen=True, slots=True)
class Workload:
    """Pods of one template."""

    owner: str
    """Kind and name of what makes them."""
    component: str
    replicas: int | None
    """None: an autoscaler's."""
    pod: Doc
    """With metadata and spec."""
    pod_name: str
    """With {i} for the index; of pods that have a stable name."""
    subdomain: str
    """The Service that gives them names; empty where they have none."""

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.pod["metadata"]["labels"]
        return labels

    @property
    def spec(self) -> Doc:
        spec: Doc = self.pod["spec"]
        return spec

    @property
    def container(self) -> Doc:
        """The service's own."""
        container: Doc = self.spec["containers"][0]
        return container


def workloads(docs: list[Doc], *, with_tests: bool = False) -> list[Workload]:
    """Everything that makes pods."""
    return [found for doc in docs for found in _workloads(doc) if with_tests or found.component in TIERS]


def _workloads(doc: Doc) -> Iterator[Workload]:
    kind, name, spec = doc["kind"], doc["metadata"]["name"], doc.get("spec", {})

    def make(pod: Doc, pod_name: str, subdomain: str) -> Workload:
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        return Workload(f"{kind}/{name}", component, spec.get("replicas"), pod, pod_name, subdomain)

    match kind:
        case "Deployment":
            yield make(spec["template"], f"{name}-5d4f8c7b9-x2x4z", "")
        case "StatefulSet":
            yield make(spec["template"], f"{name}-{{i}}", spec["serviceName"])
        case "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            yield make(group["leaderTemplate"], f"{name}-{{i}}", name)
            yield make(group["workerTemplate"], f"{name}-{{i}}-1", name)
        case "Pod":
            yield make(doc, name, "")


def flag(workload: Workload, name: str) -> str | None:
    """The value of a flag of the service's container; None without."""
    for argument in workload.container["args"]:
        found, _, value = argument.partition("=")
        if found == name:
            return str(value)
    return None


def by_component(docs: list[Doc]) -> dict[str, Workload]:
    found = {workload.component: workload for workload in workloads(docs)}
    assert set(found) == set(TIERS)
    return found


def selects(selector: Doc, labels: dict[str, str]) -> bool:
    """Whether a label selector, in the form with matchLabels, selects an object."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", "nothing else is rendered"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@functools.cache
def _registry(version: str) -> referencing.Registry:
    contents = kubernetes.schema_contents(f"kubernetes-json-schema/{_folder(version)}/_definitions.json", version)
    return referencing.Resource.from_contents(contents) @ referencing.Registry()


def _folder(version: str) -> str:
    full = [found for found in kubernetes.all_versions() if kubernetes.major_minor(found) == version]
    return f"v{full[-1]}-local-strict"


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Any:
    group, _, name = api_version.rpartition("/")
    file = f"{kind.lower()}-{group.partition('.')[0] + '-' if group else ''}{name}.json"
    schema = kubernetes.schema_contents(f"kubernetes-json-schema/{_folder(version)}/{file}", version)
    registry = referencing.Resource.from_contents(schema) @ _registry(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


def problems(doc: Doc, version: str) -> list[str]:
    """What `kubernetes-validate --strict` has against an object: its schemas, read once and not for every object."""
    where = f"{doc['kind']}/{doc['metadata']['name']} in {version}"
    if f"{doc['apiVersion']}/{doc['kind']}" in APIS:
        from tests.chart.custom_kinds import SCHEMAS, parts

        errors = list(jsonschema.Draft202012Validator(SCHEMAS[doc["kind"]]).iter_errors(doc))
        found = [f"{where}: {error.json_path}: {error.message}" for error in errors]
        return found + [problem for part in parts(doc) for problem in problems(part, version)]
    errors = list(_validator(version, doc["kind"], doc["apiVersion"]).iter_errors(doc))
    return [f"{where}: {error.json_path}: {error.message}" for error in errors]


def dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
