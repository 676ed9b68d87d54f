"""What the chart tells the processes is what they understand; values, schema and README say the same."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import yaml

from core_svc.settings import CoreSettings
from frontend_svc.settings import FrontendSettings
from pagewire import generate, supervisor
from pagewire.runtime.settings import parse_settings
from tests.chart.chart_support import (
    CHART,
    ROOT,
    SCENARIOS,
    TIERS,
    TOOLS,
    by_component,
    of_kind,
    render,
    scenario,
    tool,
    workloads,
)
from worker_svc.settings import WorkerSettings

SERVICES = {"frontend": FrontendSettings, "core": CoreSettings, "worker": WorkerSettings}
# Variables that are no settings, and where the program reads them.
OWN_VARIABLES = {
    "PAGEWIRE_CACHE": "worker_svc/fetch.py",
    "PAGEWIRE_KERNEL_CACHE": "kernels/cpu/jit.py",
}
FOREIGN_VARIABLES = {
    *("POD_NAME", "HOME", "GRPC_EXPERIMENTS", "HF_HOME", "HF_TOKEN", "HF_HUB_DISABLE_TELEMETRY", "TRITON_CACHE_DIR"),
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME"),
    *("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_RESOURCE_ATTRIBUTES"),
    "OTEL_METRICS_EXPORTER",
}


def environment(workload, docs):
    """Variables of a workload's container as the kubelet would make them."""
    maps = {doc["metadata"]["name"]: doc["data"] for doc in of_kind(docs, "ConfigMap")}
    found = {}
    for source in workload.container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for variable in workload.container["env"]:
        found[variable["name"]] = _value(variable, workload)
    return {name: expand(value, found) for name, value in found.items()}


def _value(variable, workload):
    if "value" in variable:
        assert isinstance(variable["value"], str)
        return variable["value"]
    (kind,) = variable["valueFrom"]
    source = variable["valueFrom"][kind]
    if kind == "fieldRef":
        assert source == {"fieldPath": "metadata.name"}
        return workload.pod_name.format(i=0)
    if kind == "resourceFieldRef":
        assert source == {"containerName": workload.container["name"], "resource": "requests.cpu"}
        return str(math.ceil(_cpus(workload.container["resources"]["requests"]["cpu"])))
    assert kind == "secretKeyRef" and source["name"] and source["key"]
    return "from a secret"


def _cpus(text):
    return int(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def expand(text, variables):
    """$(NAME) as the kubelet replaces it; what is unknown stays."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def flags_of(cls):
    names = {name.replace("_", "-") for name in cls.__dataclass_fields__}
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names}


def settings_of(workload, docs, extra_environment=()):
    cls = SERVICES[workload.component]
    variables = environment(workload, docs) | dict(extra_environment)
    arguments = [expand(argument, variables) for argument in workload.container["args"]]
    return parse_settings(cls, workload.component, arguments, environ=variables)


@pytest.mark.parametrize("name", SCENARIOS)
def test_processes_understand_flags_and_variables(name):
    docs = scenario(name)
    for workload in workloads(docs):
        assert "command" not in workload.container, "would go past the image's init"
        settings = settings_of(workload, docs)
        assert settings.host == "0.0.0.0"
        assert settings.port == {"frontend": 50051, "core": 50052, "worker": 50053}[workload.component]
        fields = SERVICES[workload.component].__dataclass_fields__
        for variable in environment(workload, docs):
            if variable in OWN_VARIABLES:
                assert variable in (ROOT / OWN_VARIABLES[variable]).read_text()
            elif variable.startswith("PAGEWIRE_"):
                prefix = f"PAGEWIRE_{workload.component.upper()}_"
                assert variable.startswith(prefix) and variable.removeprefix(prefix).lower() in fields, variable
            else:
                assert variable in FOREIGN_VARIABLES


def test_values_reach_their_settings():
    docs = scenario("groups")
    found = by_component(docs)
    core, worker = settings_of(found["core"], docs), settings_of(found["worker"], docs)
    assert (core.model, core.revision, core.dtype, core.max_model_len) == ("Qwen/Qwen3-0.6B", "main", "bfloat16", 8192)
    assert (core.max_num_seqs, core.kv_cache_memory_bytes, core.enable_prefix_caching) == (256, 2**31, False)
    assert (core.log_requests, core.worker_silence_s, core.startup_timeout_s) == (True, 8.0, 600)
    assert worker.num_threads == 4
    assert settings_of(found["frontend"], docs).max_tokens_behind == 1000000
    docs = scenario("everything")
    found = by_component(docs)
    worker = settings_of(found["worker"], docs)
    assert (worker.device, worker.gpu_memory_utilization) == ("cuda:0", 0.5)
    # One thread per CPU asked for, and not per CPU of the node.
    assert worker.num_threads == 4
    core = settings_of(found["core"], docs)
    assert core.policy == "priority"
    assert core.tls is not None and core.tls.ca_file == "/etc/pagewire/tls/ca.crt"


def test_a_fraction_of_a_cpu_is_one_thread():
    docs = render(sets=("worker.resources.requests.cpu=500m",))
    assert settings_of(by_component(docs)["worker"], docs).num_threads == 1


def test_who_is_asked_for_a_certificate():
    """All check servers against ca.crt; who calls is asked for a certificate as the values say."""

    def who_asks_nobody(docs):
        for workload in workloads(docs):
            assert "--tls-ca-file=/etc/pagewire/tls/ca.crt" in workload.container["args"]
            assert "--tls-cert-file=/etc/pagewire/tls/tls.crt" in workload.container["args"]
        return {w.component for w in workloads(docs) if "--no-tls-client-auth" in w.container["args"]}

    assert who_asks_nobody(scenario("tls-secret")) == set()
    assert who_asks_nobody(scenario("tls-one-way")) == set(TIERS)
    public = render(*SCENARIOS["tls-secret"], sets=("tls.clientCertificates=false",))
    assert who_asks_nobody(public) == {"frontend"}
    (pod,) = of_kind(public, "Pod")
    assert not any(argument.startswith("--tls-cert-file") for argument in pod["spec"]["containers"][0]["args"])


def service_links(docs):
    """What the kubelet adds to every pod of a namespace for its Services, unless enableServiceLinks is false."""
    found = {}
    for doc in of_kind(docs, "Service"):
        if doc["spec"].get("clusterIP") == "None":
            continue
        name = doc["metadata"]["name"].upper().replace("-", "_")
        port = doc["spec"]["ports"][0]["port"]
        found |= {f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_SERVICE_PORT": str(port)}
        found |= {f"{name}_PORT": f"tcp://10.0.0.1:{port}", f"{name}_PORT_{port}_TCP_ADDR": "10.0.0.1"}
    return found


def test_variables_of_services_do_not_reach_the_settings(capsys):
    """A Service called pagewire-frontend would be PAGEWIRE_FRONTEND_PORT=tcp://... to every pod of the namespace."""
    docs = render(release="pagewire")
    links = service_links(docs)
    assert links["PAGEWIRE_FRONTEND_PORT"] == "tcp://10.0.0.1:50051"
    # What would happen to a frontend whose port is no flag.
    with pytest.raises(SystemExit):
        parse_settings(FrontendSettings, "frontend", [], environ=links)
    assert "PAGEWIRE_FRONTEND_PORT is 'tcp://10.0.0.1:50051'" in capsys.readouterr().err
    for name in SCENARIOS:
        for workload in workloads(scenario(name), with_tests=True):
            assert workload.spec["enableServiceLinks"] is False, f"{name}: {workload.owner}"


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "minimal"])
def test_the_helm_test_asks_a_frontend(name):
    """Its arguments are those of `pagewire generate`, and its address is the Service's."""
    docs = scenario(name)
    (pod,) = of_kind(docs, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["pagewire", "generate"]
    parser = generate._parser()
    arguments = parser.parse_args(container["args"])
    host, _, port = arguments.server.partition(":")
    services = {f"{d['metadata']['name']}.inference.svc.cluster.local": d for d in of_kind(docs, "Service")}
    assert int(port) in [p["port"] for p in services[host]["spec"]["ports"]]
    assert services[host]["spec"]["selector"]["app.kubernetes.io/component"] == "frontend"
    assert arguments.prompt == "The capital of France is"
    assert not any(character in " ".join(container["args"]) for character in "$;|&<>"), "needs a shell"
    assert {variable["name"] for variable in container["env"]} <= {"HOME", "PAGEWIRE_API_KEY"}


def test_grpc_experiments_are_those_of_serve():
    assert yaml.safe_load((CHART / "values.yaml").read_text())["grpcExperiments"] == supervisor.GRPC_EXPERIMENTS


@pytest.mark.parametrize("program", ["make_schema.py", "make_readme.py"])
def test_generated_files_are_up_to_date(program):
    done = subprocess.run([sys.executable, TOOLS / program, "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_value_is_explained():
    values = tool("chart_values").chart_values()
    assert len(values) > 200
    assert [value.path for value in values if not value.comment] == []


def test_every_value_is_in_the_schema_and_used():
    """Each default is allowed as it is, and each value's name occurs in a template."""
    templates = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    schema = tool("make_schema").root()
    for value in tool("chart_values").chart_values():
        node = schema
        for part in value.path.split("."):
            node = node["properties"][part]
        if not re.search(r"\.resources\.", value.path):
            assert re.search(rf"\b{value.path.rpartition('.')[2]}\b", templates), value.path


def test_reading_values_with_comments():
    read_values = tool("chart_values").read_values
    text = (
        "# Not of a.\n\n# What a is.\n# In two lines.\na: 1\nb:\n  # Of c.\n  c: {d: 2}\n  e: []\n# Of f.\nf:\n  g: x\n"
    )
    found = [(value.path, value.default, value.comment) for value in read_values(text)]
    assert found == [
        ("a", 1, "What a is. In two lines."),
        ("b.c", {"d": 2}, "Of c."),
        ("b.e", [], ""),
        ("f", {"g": "x"}, "Of f."),
    ]


def test_every_setting_has_a_place():
    """A setting is either a value of the chart or can be given by name; the chart owns no name that does not exist."""
    owned = tool("schema_parts").CHART_OWNED
    for tier in TIERS:
        assert owned[tier] - set(SERVICES[tier].__dataclass_fields__) == set()
        given = " ".join(by_component(scenario("everything"))[tier].container["args"])
        unset = {name for name in owned[tier] if f"--{name.replace('_', '-')}=" not in given}
        # Model flags are there where they have a value.
        unset -= {"preload", "die_with_parent", "revision", "dtype", "quantization", "max_model_len", "model"}
        assert unset <= {"tls_client_auth"}
