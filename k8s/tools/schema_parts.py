"""Pieces of the chart's schema: short words for JSON Schema, and the settings of the three services."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from core_svc.settings import CoreSettings
from frontend_svc.settings import FrontendSettings
from pagewire.runtime.settings import parse_bytes
from worker_svc.settings import WorkerSettings

SERVICES: dict[str, type[Any]] = {"frontend": FrontendSettings, "core": CoreSettings, "worker": WorkerSettings}
_EVERYWHERE = {
    *(
        "host",
        "port",
        "log_level",
        "log_format",
        "tls_client_auth",
        "drain_s",
        "lame_duck_s",
        "tls_ca_file",
        "tls_cert_file",
    ),
    *("tls_key_file", "health_host", "health_port", "metrics_host", "metrics_port"),
}
CHART_OWNED = {
    "frontend": _EVERYWHERE | {"core", "api_keys_file"},
    "core": _EVERYWHERE
    | {"worker", "model", "revision", "dtype", "quantization", "max_model_len", "startup_timeout_s"},
    # The model is what the core asks for.
    "worker": _EVERYWHERE | {"device", "model", "preload", "dtype", "quantization", "max_model_len", "die_with_parent"},
}
"""Settings that other values of the chart set, or that make no sense in a pod."""

Schema = dict[str, Any]
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
FREE: Schema = {"type": "object"}
"""An object of Kubernetes' own, handed on as it is: the API server checks it."""
STRINGS: Schema = {"type": "array", "items": STRING}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
STRING_MAP: Schema = {"type": "object", "additionalProperties": STRING}
SCALAR_MAP: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i|[MGTPE])?$"}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(h|m|s|ms))+$"}
RESOURCES: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        key: {
            "type": "object",
            "additionalProperties": {"anyOf": [QUANTITY, {"type": "number", "exclusiveMinimum": 0}]},
        }
        for key in ("requests", "limits")
    }
    | {"claims": OBJECTS},
}
COUNT_OR_PERCENT: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}


def integer(low: int, high: int | None = None) -> Schema:
    """A whole number within bounds, which are inclusive."""
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def one_of(*choices: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(choices)}


def strict(properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings(service: str) -> Schema:
    """Settings by name that the chart has no value of its own for."""
    hints = typing.get_type_hints(SERVICES[service])
    return strict(
        {
            field.name: _setting(hints[field.name], field)
            for field in dataclasses.fields(SERVICES[service])
            if field.name not in CHART_OWNED[service]
        }
    )


def _setting(hint: Any, field: dataclasses.Field[Any]) -> Schema:
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    meta = field.metadata
    bounds = {name: meta[key] for key, name in (("low", "minimum"), ("high", "maximum")) if meta[key] is not None}
    described = {"description": meta["help"]}
    if meta["parse"] is parse_bytes:
        text = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*([kKmMgGtT][iI]?)?[bB]?$"}
        return described | {"anyOf": [{"type": "integer"} | bounds, text]}
    if meta["choices"] is not None:
        return described | {"enum": list(meta["choices"])}
    kinds = {bool: "boolean", int: "integer", float: "number"}
    return described | {"type": kinds.get(hint, "string")} | bounds


def settings_of(service: str) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a service's settings by name."""
    return {field.name: field for field in dataclasses.fields(SERVICES[service])}
