"""Writes the chart's values.schema.json; with --check it only compares.

The settings of the three services come with their types, bounds and choices: what a process would refuse is refused
before anything is installed. Descriptions are the comments of values.yaml.
"""

from __future__ import annotations

import json
import sys
import typing

from chart_values import CHART, chart_values
from schema_parts import (
    BOOLEAN,
    COUNT_OR_PERCENT,
    DURATION,
    FREE,
    NAME,
    OBJECTS,
    QUANTITY,
    RESOURCES,
    SCALAR_MAP,
    STRING,
    STRING_MAP,
    STRINGS,
    Schema,
    integer,
    one_of,
    settings,
    settings_of,
    strict,
)

LEVEL = "(debug|info|warning|error)"


def probe(*, has_seconds: bool = False, has_threshold: bool = False) -> Schema:
    """Times of a probe."""
    properties = {"periodSeconds": integer(1), "timeoutSeconds": integer(1)}
    if has_seconds:
        properties["seconds"] = integer(1)
    if has_threshold:
        properties["failureThreshold"] = integer(1)
    return strict(properties)


def tier(service: str, properties: Schema) -> Schema:
    """What the three tiers have in common, and what one has besides."""
    return strict(
        {
            "image": strict(
                {
                    "repository": {"type": "string", "minLength": 1},
                    # A tag that moves makes two pods of one release two programs.
                    "tag": {
                        "type": "string",
                        "pattern": r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$",
                        "not": {"const": "latest"},
                    },
                    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                    "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
                }
            ),
            "settings": settings(service),
            "extraArgs": STRINGS,
            "extraEnv": OBJECTS,
            "extraEnvFrom": OBJECTS,
            "extraVolumes": OBJECTS,
            "extraVolumeMounts": OBJECTS,
            "extraInitContainers": OBJECTS,
            "extraContainers": OBJECTS,
            "resources": RESOURCES,
            "lameDuckSeconds": integer(0, 3600),
            "drainSeconds": integer(0, 86400),
            "preStopSleepSeconds": integer(0, 3600),
            "probes": strict(
                {
                    "startup": probe(has_seconds=service != "core"),
                    "readiness": probe(has_threshold=True),
                    "liveness": probe(has_threshold=True),
                }
            ),
            "pdb": strict(
                {
                    "enabled": BOOLEAN,
                    "maxUnavailable": {"anyOf": [integer(1), {"type": "string", "pattern": "^[1-9][0-9]?%$"}]},
                }
            ),
            "podLabels": STRING_MAP,
            "podAnnotations": STRING_MAP,
            "podSecurityContext": FREE,
            "securityContext": FREE,
            "nodeSelector": STRING_MAP,
            "tolerations": OBJECTS,
            "affinity": FREE,
            "topologySpreadConstraints": OBJECTS,
            "priorityClassName": NAME,
        }
        | properties
    )


def autoscaling(properties: Schema) -> Schema:
    """What both autoscalers have."""
    common = {
        "enabled": BOOLEAN,
        "kind": one_of("keda", "hpa"),
        "minReplicas": integer(1),
        "maxReplicas": integer(1),
        "scaleDownSeconds": integer(0, 3600),
        "prometheusAddress": {"type": "string", "pattern": "^https?://"},
        "authenticationRef": strict(
            {"name": NAME, "kind": one_of("TriggerAuthentication", "ClusterTriggerAuthentication")}
        ),
    }
    return strict(common | properties)


def monitor() -> Schema:
    """A ServiceMonitor's or PodMonitor's values."""
    return strict(
        {
            "enabled": BOOLEAN,
            "labels": STRING_MAP,
            "interval": DURATION,
            "scrapeTimeout": DURATION,
            "metricRelabelings": OBJECTS,
        }
    )


def root() -> Schema:
    """The whole schema."""
    properties: Schema = {
        # Helm puts it there where the chart is a dependency of another.
        "global": FREE,
        "nameOverride": {"type": "string", "maxLength": 63},
        "fullnameOverride": {"type": "string", "maxLength": 36, "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"},
        "commonLabels": STRING_MAP,
        "commonAnnotations": STRING_MAP,
        "clusterDomain": {"type": "string", "minLength": 1},
        "listenHost": {"type": "string", "minLength": 1},
        "imageRegistry": STRING,
        "imagePullSecrets": {"type": "array", "items": strict({"name": NAME})},
        "logLevel": {"type": "string", "pattern": f"^({LEVEL}|[\\w.]+={LEVEL})(,[\\w.]+={LEVEL})*$"},
        "logFormat": one_of("json", "text"),
        "grpcExperiments": STRING,
        "terminationMarginSeconds": integer(10, 600),
        "model": _model(),
        "hf": strict({"existingSecret": NAME, "key": STRING}),
        "tls": _tls(),
        "otel": _otel(),
        "metrics": strict(
            {
                "enabled": BOOLEAN,
                "serviceMonitor": monitor(),
                "podMonitor": monitor(),
                "alerts": strict({"enabled": BOOLEAN, "labels": STRING_MAP}),
                "dashboard": strict({"enabled": BOOLEAN, "labels": STRING_MAP, "annotations": STRING_MAP}),
            }
        ),
        "networkPolicy": _network_policy(),
        "serviceAccount": strict({"create": BOOLEAN, "name": NAME, "annotations": STRING_MAP}),
        "podSecurityContext": FREE,
        "securityContext": FREE,
        "groups": _groups(),
        "frontend": tier("frontend", _frontend()),
        "core": tier("core", {"updateStrategy": FREE}),
        "worker": tier("worker", _worker()),
        "tests": _tests(),
        "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of Pagewire"} | strict(properties)


def _model() -> Schema:
    cache = {
        "existingClaim": NAME,
        "create": BOOLEAN,
        "size": QUANTITY,
        "storageClass": NAME,
        "accessModes": {
            "type": "array",
            "minItems": 1,
            "items": one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"),
        },
        "annotations": STRING_MAP,
        "subPath": STRING,
        "readOnly": BOOLEAN,
    }
    core = settings_of("core")
    return strict(
        {
            "id": {"type": "string", "minLength": 1},
            "revision": STRING,
            "dtype": one_of(*core["dtype"].metadata["choices"]),
            "quantization": one_of(*core["quantization"].metadata["choices"]),
            "maxModelLen": integer(0),
            "loadSeconds": integer(1, 86400),
            "cache": strict(cache),
        }
    )


def _tls() -> Schema:
    issuer = {"name": NAME, "kind": {"type": "string", "minLength": 1}, "group": {"type": "string", "minLength": 1}}
    return strict(
        {
            "enabled": BOOLEAN,
            "existingSecret": NAME,
            "secrets": strict(dict.fromkeys(("frontend", "core", "worker", "client"), NAME)),
            "mutual": BOOLEAN,
            "clientCertificates": BOOLEAN,
            "certManager": strict(
                {
                    "enabled": BOOLEAN,
                    "issuerRef": strict(issuer),
                    "duration": DURATION,
                    "renewBefore": DURATION,
                    "extraDnsNames": STRINGS,
                }
            ),
        }
    )


def _otel() -> Schema:
    samplers = ("always_on", "always_off", "traceidratio")
    return strict(
        {
            "endpoint": {"type": "string", "pattern": "^(https?://.+)?$"},
            "protocol": one_of("grpc"),
            "sampler": one_of(*samplers, *(f"parentbased_{sampler}" for sampler in samplers)),
            "samplerArg": {
                "type": ["string", "number"],
                "pattern": r"^(0(\.[0-9]+)?|1(\.0+)?)?$",
                "minimum": 0,
                "maximum": 1,
            },
            "metrics": BOOLEAN,
            "resourceAttributes": SCALAR_MAP,
            "headersSecret": strict({"name": NAME, "key": STRING}),
        }
    )


def _network_policy() -> Schema:
    egress = {
        "enabled": BOOLEAN,
        "dnsPorts": {"type": "array", "minItems": 1, "items": integer(1, 65535)},
        "model": OBJECTS,
        "extra": OBJECTS,
    }
    return strict({"enabled": BOOLEAN, "frontendFrom": OBJECTS, "metricsFrom": OBJECTS, "egress": strict(egress)})


def _groups() -> Schema:
    policies = ("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart")
    return strict(
        {
            "replicas": integer(1),
            "leaderWorkerSet": strict(
                {
                    "enabled": BOOLEAN,
                    "restartPolicy": one_of(*policies),
                    "maxUnavailable": integer(0),
                    "maxSurge": integer(0),
                    "exclusiveTopology": STRING,
                }
            ),
            "autoscaling": autoscaling({"waitingRequests": integer(1), "kvUsePercent": integer(1, 100)}),
        }
    )


def _frontend() -> Schema:
    return {
        "replicas": integer(1),
        "coreDiscovery": one_of("dns", "list"),
        "apiKeys": strict({"existingSecret": NAME, "key": STRING}),
        "service": strict(
            {
                "type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
                "port": integer(1, 65535),
                "nodePort": {"type": ["integer", "null"], "minimum": 1, "maximum": 65535},
                "appProtocol": STRING,
                "annotations": STRING_MAP,
                "loadBalancerSourceRanges": STRINGS,
                "externalTrafficPolicy": one_of("", "Cluster", "Local"),
            }
        ),
        "ingress": strict(
            {"enabled": BOOLEAN, "className": NAME, "annotations": STRING_MAP, "host": STRING, "tlsSecret": NAME}
        ),
        "grpcRoute": strict(
            {"enabled": BOOLEAN, "parentRefs": OBJECTS, "hostnames": STRINGS, "annotations": STRING_MAP}
        ),
        "autoscaling": autoscaling({"requests": integer(1)}),
        "strategy": strict(
            {
                "type": one_of("RollingUpdate", "Recreate"),
                "rollingUpdate": {
                    "type": ["object", "null"],
                    "additionalProperties": False,
                    "properties": {"maxSurge": COUNT_OR_PERCENT, "maxUnavailable": COUNT_OR_PERCENT},
                },
            }
        ),
    }


def _worker() -> Schema:
    return {
        "device": {"type": "string", "pattern": "^(cpu|cuda(:[0-9]+)?)$"},
        "shmSize": {"anyOf": [{"const": ""}, QUANTITY]},
        "keepKernels": BOOLEAN,
        "drainSeconds": {"type": ["integer", "null"], "minimum": 0, "maximum": 86400},
        "runtimeClassName": NAME,
        "updateStrategy": FREE,
    }


def _tests() -> Schema:
    return strict(
        {
            "enabled": BOOLEAN,
            "prompt": {"type": "string", "pattern": "^[^-]"},
            "maxTokens": integer(1),
            "timeoutSeconds": integer(1),
            "apiKeySecret": strict({"name": NAME, "key": STRING}),
            "resources": RESOURCES,
        }
    )


def describe(schema: Schema) -> Schema:
    """The schema with the comments of values.yaml as descriptions."""
    described = typing.cast(Schema, json.loads(json.dumps(schema)))
    for value in chart_values():
        node = described
        for part in value.path.split("."):
            node = node.get("properties", {}).get(part, {})
        if node:
            node.setdefault("description", value.comment)
    return described


def text() -> str:
    """The file."""
    return json.dumps(describe(root()), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Returns the exit status."""
    path = CHART / "values.schema.json"
    if "--check" in sys.argv[1:]:
        is_same = path.read_text() == text()
        if not is_same:
            print(f"{path} is out of date: run python k8s/tools/make_schema.py", file=sys.stderr)
        return int(not is_same)
    path.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
