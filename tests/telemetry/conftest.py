"""Fixtures of the tests of traces: one receiver, one collector and one deployment for all that do not break them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "core", HERE.parent / "frontend"):
    sys.path.insert(0, str(folder))

from otlp_receiver import OtlpReceiver
from traced_processes import Collector, TracedDeployment, write_model


@pytest.fixture(scope="session")
def receiver() -> Iterator[OtlpReceiver]:
    found = OtlpReceiver()
    yield found
    found.close()


@pytest.fixture(scope="session")
def collector(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    found = Collector(receiver.endpoint, tmp_path_factory.mktemp("rotel"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def traced_deployment(collector: Collector, tiny_model: Path) -> Iterator[TracedDeployment]:
    found = TracedDeployment(collector.endpoint, tiny_model)
    yield found
    found.stop()
