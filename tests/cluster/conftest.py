from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import ControlPlane, control_plane


@pytest.fixture(scope="session")
def plane(tmp_path_factory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("cluster")) as found:
        yield found
