from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.images.podman_support import TARGETS, Running, deployed, image


@pytest.fixture(scope="session")
def running(tmp_path_factory) -> Iterator[Running]:
    """One deployment from the chart for all tests of it."""
    for target in TARGETS:
        image(target)
    with deployed(tmp_path_factory.mktemp("values")) as found:
        yield found
