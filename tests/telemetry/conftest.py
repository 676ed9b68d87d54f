"""One deployment with metrics for all tests that do not break it; those that do come last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.telemetry.metrics_support import Measured

BLOCKS, BLOCK_SIZE = 22, 16


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Three processes; the pool is one that two requests of 12 blocks each can't share."""
    flags = (f"--num-kv-blocks={BLOCKS}", f"--block-size={BLOCK_SIZE}", "--max-num-seqs=8")
    with Measured(tmp_path_factory.mktemp("metrics"), flags) as running:
        yield running
