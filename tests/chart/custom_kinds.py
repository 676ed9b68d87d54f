"""Kinds that are not Kubernetes' own, as far as the chart uses them: their fields, as their projects define them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "array", "items": TEXT}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
SELECTOR: Schema = {"type": "object", "properties": {"matchLabels": LABELS, "matchExpressions": {"type": "array"}}}
ANYTHING: Schema = {"type": "object"}


def strict(required: str, **properties: Any) -> Schema:
    """An object that has no other properties; `required`: names with spaces between them."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def kind(api_version: str, name: str, spec: Schema) -> Schema:
    """A whole object."""
    return strict(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": name},
        metadata=strict("name labels", name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS),
        spec=spec,
    )


ENDPOINTS: Schema = {
    "type": "array",
    "items": strict(
        "port", port=TEXT, path=TEXT, interval=TEXT, scrapeTimeout=TEXT, metricRelabelings={"type": "array"}
    ),
}
MONITOR = {
    "jobLabel": TEXT,
    "targetLabels": TEXTS,
    "podTargetLabels": TEXTS,
    "namespaceSelector": strict("", matchNames=TEXTS),
    "selector": SELECTOR,
}
RULE = {
    "type": "object",
    "required": ["expr"],
    "properties": {"expr": {"type": ["string", "integer"]}, "for": TEXT, "labels": LABELS, "annotations": LABELS},
}
TRIGGER = strict(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    # KEDA takes texts only.
    metadata=strict("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
    authenticationRef=strict("name", name=TEXT, kind=TEXT),
)

SCHEMAS: dict[str, Schema] = {
    "LeaderWorkerSet": kind(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        strict(
            "leaderWorkerTemplate",
            replicas=COUNT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            networkConfig=strict("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
            rolloutStrategy=strict(
                "type",
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=strict("", maxUnavailable=COUNT, maxSurge=COUNT, partition=COUNT),
            ),
            leaderWorkerTemplate=strict(
                "workerTemplate",
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                leaderTemplate=ANYTHING,
                workerTemplate=ANYTHING,
            ),
        ),
    ),
    "Certificate": kind(
        "cert-manager.io/v1",
        "Certificate",
        strict(
            "secretName issuerRef",
            secretName=TEXT,
            issuerRef=strict("name", name=TEXT, kind=TEXT, group=TEXT),
            duration=TEXT,
            renewBefore=TEXT,
            privateKey=strict(
                "",
                algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                size={"type": "integer"},
                rotationPolicy={"enum": ["Always", "Never"]},
            ),
            usages={"type": "array", "items": {"enum": ["server auth", "client auth", "digital signature"]}},
            dnsNames=TEXTS,
        ),
    ),
    "ServiceMonitor": kind(
        "monitoring.coreos.com/v1", "ServiceMonitor", strict("endpoints selector", endpoints=ENDPOINTS, **MONITOR)
    ),
    "PodMonitor": kind(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        strict("podMetricsEndpoints selector", podMetricsEndpoints=ENDPOINTS, **MONITOR),
    ),
    "PrometheusRule": kind(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        strict(
            "groups",
            groups={
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["name", "rules"],
                    "properties": {"name": TEXT, "rules": {"type": "array", "items": RULE}},
                },
            },
        ),
    ),
    "ScaledObject": kind(
        "keda.sh/v1alpha1",
        "ScaledObject",
        strict(
            "scaleTargetRef triggers",
            scaleTargetRef=strict("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            advanced=strict("", horizontalPodAutoscalerConfig=strict("", behavior=ANYTHING)),
            triggers={"type": "array", "minItems": 1, "items": TRIGGER},
        ),
    ),
    "GRPCRoute": kind(
        "gateway.networking.k8s.io/v1",
        "GRPCRoute",
        strict(
            "parentRefs rules",
            parentRefs={"type": "array", "minItems": 1, "items": strict("name", name=TEXT, namespace=TEXT)},
            hostnames=TEXTS,
            rules={
                "type": "array",
                "items": strict(
                    "backendRefs", backendRefs={"type": "array", "items": strict("name port", name=TEXT, port=COUNT)}
                ),
            },
        ),
    ),
}


def parts(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """What of an object is Kubernetes' own, as objects of Kubernetes."""
    name = doc["metadata"]["name"]
    if doc["kind"] == "LeaderWorkerSet":
        group = doc["spec"]["leaderWorkerTemplate"]
        return [
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": f"{name}:{key}"},
                "template": group[key],
            }
            for key in ("leaderTemplate", "workerTemplate")
        ]
    if doc["kind"] == "ScaledObject":
        behavior = doc["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        spec = {"scaleTargetRef": {"kind": "x", "name": "x"}, "maxReplicas": 1, "behavior": behavior}
        return [
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": {"name": name},
                "spec": spec,
            }
        ]
    return []
