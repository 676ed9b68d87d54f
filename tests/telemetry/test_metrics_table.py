"""docs/metrics.md names what the services declare, and they expose what they declare: all of it, and nothing else."""

from __future__ import annotations

import pytest

from tests.telemetry.declared_metrics import declared, documented
from tests.telemetry.metrics_support import SERVICES, Measured

# A sum, a count and buckets are a histogram's, _total a counter's, _info an info's.
SUFFIXES = {"counter": "_total", "info": "_info"}


def test_the_page_and_the_services_agree() -> None:
    page, made = documented(), declared()
    assert sorted(page.keys() - made.keys()) == [], "documented, and no service has it"
    assert sorted(made.keys() - page.keys()) == [], "not documented"
    assert [row for name, row in page.items() if row != made[name]] == []


def test_names_follow_the_rules() -> None:
    for row in declared().values():
        assert row.name.startswith(("pagewire_", "gen_ai_", "rpc_", "process_")), row
        assert row.name.endswith(SUFFIXES.get(row.kind, "")), row
        family = row.name.removesuffix("_total")
        assert not row.unit or family.endswith(row.unit), row
        if row.name.startswith("pagewire_") and len(row.services) == 1:
            assert row.name.startswith(f"pagewire_{row.services[0]}_") or row.name.startswith("pagewire_rpc_"), row


@pytest.mark.system
def test_what_is_exposed_is_what_is_declared(measured: Measured) -> None:
    for service in SERVICES:
        rows = {name: row for name, row in declared().items() if service in row.services}
        families = {name + SUFFIXES.get(f.type, ""): f for name, f in measured.scrape(service).items()}
        assert sorted(families) == sorted(rows)
        for name, family in families.items():
            assert family.type == rows[name].kind, name
            assert family.unit == rows[name].unit or name.startswith("process_"), name
            for sample in family.samples:
                assert {*sample.labels} - {"le"} <= {*rows[name].labels}, (name, sample.labels)
