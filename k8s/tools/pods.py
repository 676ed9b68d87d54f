"""Turns what `helm template` prints into what `podman kube play` (4.3) knows, and touches nothing else.

A Deployment or StatefulSet becomes its pods; a Service becomes names of the pods that it selects, on podman's network,
as cluster DNS would answer: <service>.<namespace>.svc.<domain>, and <pod>.<service>... for a StatefulSet's. Four
things in a pod change, because podman 4.3 does not have them:

- probes are dropped: it knows no gRPC probes, and fires others only where systemd has timers;
- $(VARIABLE) in commands, arguments and variables is expanded, as the kubelet does;
- annotations of more than 63 characters are dropped: it takes that for Kubernetes' limit, which it is for labels;
- of a container's ports those that are asked for are left, published on the loopback interface: the others say
  nothing to a pod's network, and podman would publish them on all interfaces.

What speaks to a cluster only (policies, budgets, scaling, accounts, custom kinds) has nobody to read it and is left out
by name; a kind that is not known here is an error. Pure functions; play.py runs podman.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

WORKLOADS = ("Deployment", "StatefulSet")
KEPT = ("ConfigMap", "Secret", "PersistentVolumeClaim")
LEFT_OUT = (
    "Certificate",
    "GRPCRoute",
    "HorizontalPodAutoscaler",
    "Ingress",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "ServiceAccount",
    "ServiceMonitor",
)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_MAX_ANNOTATION = 63
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][\w.-]*)\))")


@dataclass(frozen=True)
class Published:
    """A container's port at a port of the loopback interface."""

    pod: str
    container_port: int
    host_port: int


@dataclass(frozen=True)
class Play:
    """One pod for podman: what `kube play` is given, the pod's names on the network, and how it ends."""

    pod: Object
    documents: list[Object]
    aliases: list[str]
    is_test: bool = False

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def grace_s(self) -> int:
        return int(self.pod["spec"].get("terminationGracePeriodSeconds", 30))


def plan(
    documents: Iterable[Object | None], *, publish: Iterable[Published] = (), domain: str = "cluster.local"
) -> tuple[list[Object], list[Play]]:
    """(secrets and claims, which come first; pods) of a rendered chart. Raises ValueError for what can't be played."""
    objects = [document for document in documents if document]
    for found in objects:
        if found["kind"] not in (*WORKLOADS, *KEPT, *LEFT_OUT, "Service", "Pod"):
            raise ValueError(f"{found['kind']} {found['metadata']['name']}: a kind that this does not know")
    configs = {_name(found): found for found in objects if found["kind"] == "ConfigMap"}
    services = [found for found in objects if found["kind"] == "Service"]
    first = [found for found in objects if found["kind"] in ("Secret", "PersistentVolumeClaim")]
    wanted = list(publish)
    plays = []
    for found in objects:
        for pod, governing in _pods(found):
            is_test = "test" in found["metadata"].get("annotations", {}).get("helm.sh/hook", "")
            aliases = [] if is_test else _aliases(pod, governing, services, domain)
            pod = playable(pod, [port for port in wanted if port.pod == _name(pod)])
            used = [configs[name] for name in _config_maps(pod) if name in configs]
            plays.append(Play(pod, [*used, pod], aliases, is_test))
    missing = {port.pod for port in wanted} - {play.name for play in plays}
    if missing:
        raise ValueError(f"no such pods to publish ports of: {', '.join(sorted(missing))}")
    return first, plays


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _pods(found: Object) -> Iterable[tuple[Object, str]]:
    """(pod, name of the Service that gives it a name of its own) of a workload or a pod."""
    if found["kind"] == "Pod":
        yield found, ""
    if found["kind"] not in WORKLOADS:
        return
    spec = found["spec"]
    if spec.get("volumeClaimTemplates"):
        raise ValueError(f"{_name(found)}: volumeClaimTemplates are not known here")
    for index in range(spec.get("replicas", 1)):
        metadata = copy.deepcopy(spec["template"].get("metadata", {}))
        metadata["name"] = f"{_name(found)}-{index}"
        metadata["namespace"] = found["metadata"].get("namespace", "default")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(spec["template"]["spec"])}
        yield pod, spec.get("serviceName", "")


def _aliases(pod: Object, governing: str, services: list[Object], domain: str) -> list[str]:
    """The names under which cluster DNS would find the pod."""
    metadata, names = pod["metadata"], []
    namespace = metadata.get("namespace", "default")
    for service in services:
        selector = service["spec"].get("selector") or {}
        same_namespace = service["metadata"].get("namespace", "default") == namespace
        if not selector or not same_namespace or not selector.items() <= metadata.get("labels", {}).items():
            continue
        _check_ports(service, pod)
        full = f"{_name(service)}.{namespace}.svc.{domain}"
        names += [_name(service), full]
        if _name(service) == governing:
            names.append(f"{_name(pod)}.{full}")
    return names


def _check_ports(service: Object, pod: Object) -> None:
    """A name can't map ports: whoever calls the Service's port reaches the same one of the pod."""
    numbers = {
        port["name"]: port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
        if "name" in port
    }
    for port in service["spec"].get("ports", ()):
        target = port.get("targetPort", port["port"])
        if numbers.get(target, target) != port["port"]:
            raise ValueError(f"Service {_name(service)}: a name can't map port {port['port']} to {target!r} of the pod")


def playable(pod: Object, publish: Iterable[Published] = ()) -> Object:
    """The pod with what podman 4.3 can't do taken out or done here."""
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"].get("annotations", {})
    for key in [key for key, value in annotations.items() if len(value) > _MAX_ANNOTATION]:
        del annotations[key]
    for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
        for probe in PROBES:
            container.pop(probe, None)
        _expand_container(container, pod)
        ports = {port["containerPort"]: port for port in container.pop("ports", ())}
        published = [
            {**ports[wanted.container_port], "hostIP": "127.0.0.1", "hostPort": wanted.host_port}
            for wanted in publish
            if wanted.container_port in ports
        ]
        if published:
            container["ports"] = published
    return pod


def _expand_container(container: Object, pod: Object) -> None:
    known: dict[str, str] = {}
    for variable in container.get("env", ()):
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if "value" in variable:
            variable["value"] = expand(str(variable["value"]), known)
            known[variable["name"]] = variable["value"]
        elif path.startswith("metadata."):
            known[variable["name"]] = str(pod["metadata"][path.removeprefix("metadata.")])
    for key in ("command", "args"):
        if key in container:
            container[key] = [expand(str(word), known) for word in container[key]]


def expand(text: str, known: Mapping[str, str]) -> str:
    """$(NAME) replaced where the name is known, $$ by $, all else as it is: the kubelet's rules."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return known.get(match[2], match[0])

    return _REFERENCE.sub(replace, text)


def _config_maps(pod: Object) -> list[str]:
    """Names of the ConfigMaps that the pod reads: `kube play` wants them in the same input."""
    spec, names = pod["spec"], []
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        names += [source["configMapRef"]["name"] for source in container.get("envFrom", ()) if "configMapRef" in source]
        for variable in container.get("env", ()):
            if reference := variable.get("valueFrom", {}).get("configMapKeyRef"):
                names.append(reference["name"])
    names += [volume["configMap"]["name"] for volume in spec.get("volumes", ()) if "configMap" in volume]
    return list(dict.fromkeys(names))
