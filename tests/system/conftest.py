"""One deployment for all system tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.client import Client
from tests.system.deployment import Deployment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts real processes."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def deployment() -> Iterator[Deployment]:
    with Deployment() as running:
        yield running


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.address("frontend"), timeout_s=120) as connected:
        yield connected
