"""Where a frontend looks for its cores: fixed addresses, names that are looked up again and again, and bad ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping

import pytest
from frontend_support import (
    run,
)

import frontend_svc.core_targets as core_targets
from frontend_svc.core_targets import Target
from frontend_svc.settings import FrontendSettings


def test_names_in_dns_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a name, again and again; a name that can't be looked up keeps what it had."""
    answers: list[list[str] | OSError] = [["10.0.0.1:7"], ["10.0.0.1:7", "10.0.0.2:7"], OSError("no answer"), []]
    answers[3] = ["10.0.0.2:7"]

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("cores", 7)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(core_targets, "resolve", resolve)
    monkeypatch.setattr(core_targets, "RESOLVE_EVERY_S", 0.0)
    told: list[Mapping[str, Target]] = []

    def keep(targets: Mapping[str, Target]) -> None:
        told.append(targets)
        if not answers:
            raise asyncio.CancelledError

    async def scenario() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await core_targets.follow(["fixed:1", "dns:///cores:7"], keep)

    run(scenario())
    both = ["fixed:1", "10.0.0.1:7", "10.0.0.2:7"]
    assert [list(targets) for targets in told] == [both[:2], both, both, ["fixed:1", "10.0.0.2:7"]]
    assert told[0]["10.0.0.1:7"] == Target("10.0.0.1:7", "cores")
    assert Counter(t.server_name for t in told[1].values()) == {"": 1, "cores": 2}


def test_a_real_name_is_looked_up() -> None:
    async def scenario() -> None:
        assert "127.0.0.1:50052" in await core_targets.resolve("localhost", 50052)

    run(scenario())


@pytest.mark.parametrize("entry", ["core", "core:0", ":1", "dns:///core", "dns://8.8.8.8/core:1", "core:port"])
def test_bad_addresses_are_named(entry: str) -> None:
    with pytest.raises(ValueError, match="--core"):
        FrontendSettings(core=(entry,))
