"""A real Prometheus scrapes a real run: the dashboard's queries have data, and faults fire the alerts.

Its last test kills processes of the deployment that the tests before it share.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.telemetry.metrics_support import (
    SAMPLED,
    SERVICES,
    TRACE_ID,
    Background,
    Measured,
    eventually,
    failed,
    finish,
)
from tests.telemetry.prometheus import DASHBOARD, RULES, Prometheus, dashboard_queries, selectors, tool

pytestmark = pytest.mark.system

AFTER_A_FAULT = {"Failed steps and requests/C"}
"""Queries of the dashboard that have data once the worker was lost: no request ends with an error before."""
SLOW_MACHINE = {"PagewireFirstTokenBudgetBurnsFast", "PagewireFirstTokenBudgetBurns"}
"""May fire where tests share their processors."""
WORKER_GONE = {"PagewireTargetDown", "PagewireNotReady", "PagewireCoreWithoutWorker", "PagewireWorkerLost"}
CORE_GONE = {"PagewireFrontendWithoutCore", "PagewireCoreLost"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, measured: Measured) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus") / "server", measured) as running:
        yield running


def traffic(measured: Measured) -> None:
    """One of everything that the dashboard tells of and that is no fault."""
    finish(measured.generate(range(300, 340), max_tokens=4, trace=SAMPLED))
    finish(measured.generate(range(300, 340), max_tokens=4, trace=SAMPLED))
    finish(measured.chat("w3 w4", max_tokens=3))
    failed(measured.generate([1], model="another"))
    call = measured.generate(range(240, 250), max_tokens=300)
    next(call)
    call.cancel()


def test_every_query_of_the_dashboard_has_data(measured: Measured, prometheus: Prometheus) -> None:
    traffic(measured)
    with Background(lambda: measured.generate(range(220, 230), max_tokens=60)):
        eventually(lambda: prometheus.targets() == dict.fromkeys(SERVICES, "up"), what="three targets")
        queries = dashboard_queries()
        assert len(queries) > 100
        empty = set(queries)

        def all_have_data() -> bool:
            empty.difference_update({place for place in empty if prometheus.query(queries[place])})
            return empty <= AFTER_A_FAULT

        try:
            eventually(all_have_data, 30)
        except AssertionError:
            raise AssertionError(f"no data: { {place: queries[place] for place in empty - AFTER_A_FAULT} }") from None
        assert prometheus.firing() <= SLOW_MACHINE


def test_the_series_of_every_rule_exist(prometheus: Prometheus) -> None:
    """A rule whose series has another name would never fire. Each also parses as it stands in the file."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(rules) > 20
    for rule in rules:
        prometheus.get("query", query=rule["expr"])
        read = selectors(rule["expr"])
        assert read or "pagewire:" in rule["expr"]
        for selector in read:
            # Codes that no request had are the fault that the rule is about.
            assert prometheus.query(re.sub(r'code=~?"[^"]*"', "", selector)), (rule, selector)
    for name in ("5m", "1h"):
        eventually(lambda name=name: bool(prometheus.query(f"pagewire:first_token_slow:ratio_rate{name}")))


def test_variables_and_exemplars(prometheus: Prometheus) -> None:
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    found = [re.match(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", v.get("definition", "")) for v in variables]
    asked = [match for match in found if match is not None]
    assert [match[2] for match in asked] == ["namespace", "app_kubernetes_io_instance"]
    for match in asked:
        assert prometheus.get(f"label/{match[2]}/values", **{"match[]": match[1]})
    series = prometheus.get(
        "query_exemplars",
        query="gen_ai_server_time_to_first_token_seconds_bucket",
        start="0",
        end="4000000000",
    )
    assert {e["labels"]["trace_id"] for one in series for e in one["exemplars"]} == {TRACE_ID}


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    here = Path(__file__).parent
    check = ["check", "rules", "--lint=all", "--lint-fatal", str(RULES)]
    for arguments in (check, ["test", "rules", str(here / "pagewire.rules.test.yaml")]):
        done = subprocess.run([tool("promtool"), *arguments], cwd=here, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test() -> None:
    tests = (Path(__file__).parent / "pagewire.rules.test.yaml").read_text()
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    names = {rule["alert"] for rule in rules if "alert" in rule}
    assert names and {name for name in names if not re.search(rf"\b{name}\b", tests)} == set()
    for rule in rules:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["description"]


def test_alerts_fire_when_processes_die(measured: Measured, prometheus: Prometheus) -> None:
    with Background(lambda: measured.generate(range(220, 230), max_tokens=60)):
        eventually(lambda: measured.is_running(), what="a running request")
        measured.kill("worker")
        eventually(lambda: prometheus.firing() >= {*WORKER_GONE, "PagewireErrorRate"}, 30, "the worker's alerts")
        queries = dashboard_queries()
        assert all(prometheus.query(queries[place]) for place in AFTER_A_FAULT)
        assert not prometheus.firing() & CORE_GONE
        measured.kill("core")
        eventually(lambda: prometheus.firing() >= CORE_GONE, 30, "the core's alerts")
    assert prometheus.targets() == {"frontend": "up", "core": "down", "worker": "down"}
