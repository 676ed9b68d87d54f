"""What the pages on the chart say is so: values, metrics, seconds, settings."""

from __future__ import annotations

import re

import pytest

from tests.chart.chart_support import CHART, ROOT, TIERS, by_component, flag, scenario, tool

PAGES = {"docs": ROOT / "docs" / "kubernetes.md", "chart": CHART / "README.md"}
METRICS = ROOT / "docs" / "metrics.md"


def quoted(text):
    """Everything between backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_values_that_are_named_exist(page):
    schema = tool("make_schema").root()
    sections = set(schema["properties"])
    named = [text for text in quoted(PAGES[page].read_text()) if re.fullmatch(r"[a-zA-Z]+(\.\w+)+", text)]
    named = [text for text in named if text.partition(".")[0] in sections]
    assert len(named) > 20
    for path in named:
        node = schema
        for part in path.split("."):
            if "properties" not in node:
                # A map of Kubernetes' own, such as requests.
                break
            assert part in node["properties"], path
            node = node["properties"][part]


def test_metrics_that_are_named_exist():
    if not METRICS.exists():
        return
    texts = quoted(PAGES["docs"].read_text())
    named = {name for text in texts for name in re.findall(r"(?:pagewire|process)_\w+", text)}
    assert len(named) > 10
    documented = set(quoted(METRICS.read_text()))
    assert named - documented == set()


def test_alerts_that_are_named_exist():
    rules = CHART / "files" / "alerts" / "pagewire.rules.yaml"
    named = set(re.findall(r"alert (Pagewire\w+)", PAGES["docs"].read_text()))
    assert named
    if rules.exists():
        assert named <= set(re.findall(r"alert: (\w+)", rules.read_text()))


def test_seconds_of_a_rollout():
    """The table of what happens after SIGTERM has the seconds of the default values."""
    found = by_component(scenario("default"))
    text = PAGES["docs"].read_text().partition("## Rollout")[2]
    for tier in TIERS:
        row = re.search(rf"^\| {tier} \|(.*)\|$", text, re.MULTILINE)
        cells = [cell.strip() for cell in row[1].split("|")]
        lame_duck, drain = (int(flag(found[tier], name)) for name in ("--lame-duck-s", "--drain-s"))
        assert cells[0].startswith(f"0–{lame_duck}" if lame_duck else "")
        assert cells[1].startswith(f"{lame_duck}–{lame_duck + drain}")
        assert int(cells[2]) == found[tier].spec["terminationGracePeriodSeconds"]


def test_ports():
    for name, port in (("gRPC", "port"), ("health", "health-port"), ("metrics", "metrics-port")):
        row = re.search(rf"^\| {name}[^|]*\|(.*)\|$", PAGES["docs"].read_text(), re.MULTILINE)
        listed = [cell.strip() for cell in row[1].split("|")]
        found = by_component(scenario("default"))
        assert listed == [flag(found[tier], f"--{port}") for tier in TIERS]
