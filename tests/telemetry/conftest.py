"""One receiver, one collector, one traced and one measured deployment for all tests that do not break them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))
sys.path.insert(0, str(Path(__file__).parent))

from otlp_receiver import OtlpReceiver
from trace_support import Traces
from traced_processes import Collector, TracedDeployment, write_model

from tests.telemetry.metrics_support import Measured

BLOCKS, BLOCK_SIZE = 24, 16


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


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """A tracer whose spans stay in this process; every span without a parent is sampled."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    found = Traces()
    yield found
    found.tracer.close(5)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Three processes; the pool is one that two requests of 16 blocks each can't share."""
    flags = (f"--num-kv-blocks={BLOCKS}", f"--block-size={BLOCK_SIZE}", "--max-num-seqs=8")
    with Measured(tmp_path_factory.mktemp("metrics"), flags) as running:
        yield running
