"""A real Prometheus over a deployment: what it scrapes, what it answers, and which alerts it fires."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.telemetry.metrics_support import SERVICES, Measured, eventually

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s/chart/files/alerts/pagewire.rules.yaml"
DASHBOARD = ROOT / "k8s/chart/files/dashboards/pagewire.json"
WINDOW = "8s"


def tool(name: str) -> str:
    """The path of prometheus or promtool; a test that needs them fails without them."""
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed: apt-get install prometheus (Debian), as .ci/run does"
    return path


def quick_rules() -> dict[str, Any]:
    """The rules with windows of seconds and hardly any patience."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = "500ms"
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[\w+(:\w+)?\]", lambda m: f"[{WINDOW}{':1s' if m[1] else ''}]", rule["expr"])
            if "for" in rule:
                rule["for"] = "1s"
    return rules


class Prometheus:
    """Scrapes every half second from `__enter__` on."""

    def __init__(self, folder: Path, measured: Measured) -> None:
        folder.mkdir()
        (folder / "rules.yaml").write_text(yaml.safe_dump(quick_rules()))
        self._config = folder / "prometheus.yaml"
        self._config.write_text(yaml.safe_dump(_config(measured)))
        self._folder, self._log = folder, folder / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            tool("prometheus"),
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._address}",
            "--enable-feature=exemplar-storage",
            "--log.level=warn",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._is_ready, 30, "Prometheus")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

    def _is_ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=2) as response:
                return response.status == 200  # type: ignore[no-any-return]
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """What the HTTP API answers; an error of a query is a failure."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Samples of an instant query that are numbers."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return [sample for sample in found if sample["value"][1] not in ("NaN", "+Inf", "-Inf")]

    def targets(self) -> dict[str, str]:
        """Health by component."""
        active = self.get("targets", state="active")["activeTargets"]
        return {target["labels"]["app_kubernetes_io_component"]: target["health"] for target in active}

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {a["labels"]["alertname"] for a in self.get("alerts")["alerts"] if a["state"] == "firing"}


def _config(measured: Measured) -> dict[str, Any]:
    labels = {"namespace": "test", "app_kubernetes_io_name": "pagewire", "app_kubernetes_io_instance": "release"}
    return {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": service,
                "static_configs": [
                    {
                        "targets": [f"127.0.0.1:{measured.ports[service]}"],
                        "labels": {**labels, "app_kubernetes_io_component": service},
                    }
                ],
            }
            for service in SERVICES
        ],
    }


def dashboard_queries() -> dict[str, str]:
    """Every query of the dashboard, its variables filled in, by where it is."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }
    # The window holds the whole test: what happened once is in it.
    filled = {"$__rate_interval": "10m", "$namespace": ".*", "$release": "rel.*"}
    for variable, text in filled.items():
        found = {place: expr.replace(variable, text) for place, expr in found.items()}
    assert not [expr for expr in found.values() if "$" in expr]
    return found


def selectors(expr: str) -> list[str]:
    """The series that a rule's expression reads."""
    names = r"(?:up|(?:pagewire|gen_ai|process|rpc)_\w+)\b(?:\{[^}]*\})?"
    return re.findall(rf"(?<![\w:])({names})(?!\s*\()", expr)
