"""The parts of `pagewire top` by themselves: any size of screen, services that are away, rates, short texts."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.text import Text

from pagewire.columns import int32
from pagewire.engine import CoreStats
from pagewire.runtime.server import GrpcServer
from pagewire.stats import (
    BlockColumns,
    BlockState,
    CoreConnection,
    CoreDetail,
    FrontendStats,
    ProcessStats,
    RequestColumns,
    StepColumns,
    WorkerStats,
)
from pagewire.top.client import Deployment
from pagewire.top.command import main
from pagewire.top.data import Answer, Sample, rates_between, to_json
from pagewire.top.format import (
    ASCII,
    UNICODE,
    block_map,
    count,
    duration,
    milliseconds,
    share,
    shortened,
    size,
    sparkline,
    stage_bar,
)
from pagewire.top.screen import screen
from pagewire.v1 import core_pb2, core_pb2_grpc, frontend_pb2, frontend_pb2_grpc
from tests.top.top_support import SmallDeployment

NUM_REQUESTS, NUM_STEPS = 40, 64


def detail() -> CoreDetail:
    """A busy core with large numbers."""
    numbers = int32(range(1, NUM_REQUESTS + 1))
    names = [f"a-rather-long-name-of-a-request-that-somebody-made-{i}" for i in range(NUM_REQUESTS)]
    requests = RequestColumns(NUM_REQUESTS + 5, names, numbers.astype(np.uint64), numbers * 0, *[numbers] * 2)
    requests.states = int32(1 + i % 3 for i in range(NUM_REQUESTS))
    requests.ages_ms = np.full(NUM_REQUESTS, 10**7, np.uint64)
    for i, name in enumerate(RequestColumns.__slots__[7:]):
        setattr(requests, name, numbers * 131_072 // (i + 1))
    steps = StepColumns(np.arange(10**7, 10**7 + NUM_STEPS, dtype=np.uint64), np.full(NUM_STEPS, 10**9, np.uint64))
    for name in StepColumns.__slots__[2:]:
        setattr(steps, name, int32(range(NUM_STEPS)) * 100_003)
    steps.is_failed = int32([1] * NUM_STEPS)
    states = bytes(1 + i * i % 4 for i in range(8192))
    process = ProcessStats("c" * 32, 4_194_304, 10**9, 2**40, 10**9, "0.1.0")
    blocks = BlockColumns(1_000_000, 123, states)
    return CoreDetail(process, "m" * 60, 16, 1024, 8192, "worker:1", "", 0, False, requests, steps, blocks)


def sample(taken_s: float = 2.0, **numbers: int) -> Sample:
    """A deployment of which everything is known."""
    process = ProcessStats("f" * 32, 4_194_304, 10**9, 2**40, 10**9, "0.1.0")
    frontend = FrontendStats(process, (CoreConnection("core:1", True, "c" * 32, "model", 3),), num_requests=123_456)
    worker = WorkerStats(process=process, epoch=3, device="cuda", is_stream_open=True)
    core = CoreStats(**{"num_total_blocks": 1_000_000, "num_frontends": 100, **numbers}, detail=detail())
    target = "pagewire-worker-0.pagewire-worker.default.svc.cluster.local:50053"
    return Sample(
        taken_s,
        1.7e9,
        Answer(target, "ready", frontend),
        Answer(target, "ready", core),
        Answer(target, "ready", worker),
    )


def away(error: str = "failed to connect: Connection refused (111)") -> Sample:
    """A deployment of which nothing answers."""
    nobody: Answer[None] = Answer("127.0.0.1:50051", "down", None, error)
    return Sample(2.0, 1.7e9, nobody, nobody, nobody)  # type: ignore[arg-type]


def plain(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_size_of_screen_gets_whole_lines_and_no_more_than_fit(glyphs):
    busy, idle = sample(num_generated_tokens=10**9), replace(sample(), core=Answer("core:1", "ready", CoreStats()))
    for now in (busy, idle, away(), away("a\nlong error " * 50)):
        for width in (30, 79, 80, 200):
            for height in (5, 24, 60, None):
                lines = screen(sample(1.0), now, width=width, height=height, glyphs=glyphs, note="note")
                assert height is None or len(lines) <= height
                assert all(line.cell_len <= width and "\n" not in line.plain for line in lines)
    if glyphs is ASCII:
        assert plain(screen(None, busy, width=200, height=60, glyphs=ASCII, note="")).isascii()


def test_a_full_size_screen_is_used_to_its_last_line():
    for width, height in ((80, 24), (160, 48), (200, 60)):
        lines = screen(None, sample(), width=width, height=height, glyphs=UNICODE, note="")
        assert len(lines) == height
        assert lines[-1].plain.startswith("a-")


def test_numbers_are_whole_or_not_there():
    """A table leaves columns out where there is no room; it never cuts a number."""
    wide = plain(screen(None, sample(), width=200, height=60, glyphs=UNICODE, note=""))
    narrow = plain(screen(None, sample(), width=80, height=60, glyphs=UNICODE, note=""))
    assert "PREEMPTED" in wide and "DRAFTS" in wide and "by stage" in wide
    assert "DRAFTS" not in narrow and "DEBT" in narrow and "by stage" not in narrow
    assert "about 250000" not in narrow
    assert "they owe" not in wide and "the first 40 owe" in wide


def test_what_is_wrong_is_said():
    assert plain(screen(None, away(), width=80, height=24, glyphs=UNICODE, note="")).count("connection refused") == 3
    busy = detail()
    stuck = replace(
        busy, step_age_ms=5000, is_partial=True, snapshot_age_ms=4200, unavailable="the worker is lost: gone"
    )
    now = replace(sample(), core=Answer("core:1", "not ready", CoreStats(is_paused=True, detail=stuck)))
    text = plain(screen(None, now, width=120, height=30, glyphs=UNICODE, note=""))
    assert "one runs for 5.0s" in text and text.count("4.2s ago") == 2 and "the worker is lost" in text
    paused = replace(sample(), core=Answer("core:1", "ready", CoreStats(is_paused=True, sleep_level=2, detail=busy)))
    assert "paused, asleep at 2" in plain(screen(None, paused, width=120, height=30, glyphs=UNICODE, note=""))


def test_rates_are_differences_of_one_core_per_second():
    before = sample(1.0, num_generated_tokens=100, num_finished=1, prefix_cache_queries=10)
    now = sample(3.0, num_generated_tokens=150, num_finished=2, prefix_cache_queries=30, prefix_cache_hits=5)
    found = rates_between(before, now)
    assert found is not None
    assert (found.generated_tokens, found.requests, found.preemptions, found.hit_rate) == (25.0, 0.5, 0.0, 0.25)
    assert rates_between(None, now) is None
    assert rates_between(before, away()) is None
    assert now.core.stats is not None and now.core.stats.detail is not None
    other = replace(now.core.stats.detail, process=ProcessStats("another life"))
    restarted = replace(now, core=replace(now.core, stats=replace(now.core.stats, detail=other)))
    assert rates_between(before, restarted) is None
    assert to_json(away(), None)["services"]["core"]["health"] == "down"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(9_999_999), "9999999"),
        (count(12_345_678), "12.35M"),
        (duration(85), "85ms"),
        (duration(1440), "1.4s"),
        (duration(42_000), "42s"),
        (duration(185_000), "3m05"),
        (duration(26_500_000), "7h21"),
        (duration(274_000_000), "3d04"),
        (duration(1e12), "11574d"),
        (milliseconds(1234), "1.23"),
        (milliseconds(123_456), "123"),
        (share(None), "-"),
        (share(0.1234), "12.3%"),
        (size(0), "-"),
        (size(3 * 2**29), "1.5G"),
        (shortened("abcdefgh", 5, ASCII), "ab~gh"),
        (shortened("abcdefgh", 8, ASCII), "abcdefgh"),
        (sparkline([0, 1, 100], ASCII), " .@"),
        (stage_bar([1, 2, 1, 0], 8, 8, ASCII), "sEEu"),
    ],
)
def test_short_texts(text: str, expected: str):
    assert text == expected


def test_a_cell_of_the_map_shows_what_its_blocks_are():
    free, cached, used, shared = (int(state) for state in BlockState)
    states = bytes([free] * 4 + [free, free, free, used] + [free, used, used, cached] + [shared] * 4)
    assert block_map(states, 4) == [BlockState.FREE, BlockState.FREE, BlockState.USED, BlockState.SHARED]
    assert len(block_map(states, 100)) == len(states)
    assert block_map(b"", 10) == []


@pytest.fixture(scope="module")
def deployment() -> Iterator[SmallDeployment]:
    with SmallDeployment() as running:
        yield running


def closed_port() -> str:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{holder.getsockname()[1]}"


@pytest.mark.parametrize("who", ["frontend", "core", "worker"])
def test_one_service_is_away_and_the_others_are_shown(deployment: SmallDeployment, who: str):
    targets = {
        "frontend": deployment.frontend_target,
        "core": deployment.core_target,
        "worker": deployment.worker_target,
        who: closed_port(),
    }

    async def look() -> Sample:
        asked = Deployment(targets)
        try:
            return await asked.look()
        finally:
            await asked.close()

    now = asyncio.run(look())
    answers = {"frontend": now.frontend, "core": now.core, "worker": now.worker}
    for service, answer in answers.items():
        assert answer.health == ("down" if service == who else "ready")
        assert (answer.stats is None) == (service == who)
    assert "refused" in answers[who].error
    text = plain(screen(None, now, width=80, height=24, glyphs=UNICODE, note=""))
    assert text.count("connection refused") == 1 and text.count(" ready ") == 2


def test_a_service_that_hangs_is_down_within_the_bound(deployment: SmallDeployment):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"

        async def look() -> Sample:
            asked = Deployment({"frontend": deployment.frontend_target, "worker": target}, timeout_s=0.5)
            try:
                return await asyncio.wait_for(asked.look(), 5)
            finally:
                await asked.close()

        now = asyncio.run(look())
    assert now.worker.health == "down" and now.worker.stats is None
    assert now.frontend.health == now.core.health == "ready"


def test_the_api_key_goes_to_the_frontend_alone():
    """And is shown nowhere."""

    class Keeper(frontend_pb2_grpc.FrontendServiceServicer, core_pb2_grpc.EngineCoreServiceServicer):
        def __init__(self) -> None:
            self.seen: list[tuple[str, object]] = []

        async def GetStats(self, request: object, context: Any) -> frontend_pb2.GetStatsResponse:
            self.seen.append(("frontend", dict(context.invocation_metadata()).get("authorization")))
            return frontend_pb2.GetStatsResponse()

        async def Utility(self, request: object, context: Any) -> core_pb2.UtilityResponse:
            self.seen.append(("core", dict(context.invocation_metadata()).get("authorization")))
            return core_pb2.UtilityResponse(stats=core_pb2.CoreStats(detail=core_pb2.CoreDetail()))

    async def look() -> tuple[Keeper, Sample]:
        server, keeper = GrpcServer(["pagewire.v1.FrontendService"]), Keeper()
        frontend_pb2_grpc.add_FrontendServiceServicer_to_server(keeper, server.aio)
        core_pb2_grpc.add_EngineCoreServiceServicer_to_server(keeper, server.aio)
        target = f"127.0.0.1:{await server.start()}"
        asked = Deployment({"frontend": target, "core": target, "worker": closed_port()}, api_key="sesame")
        now = await asked.look()
        await asked.close()
        await server.drain(0)
        return keeper, now

    keeper, now = asyncio.run(look())
    assert sorted(keeper.seen, key=str) == [("core", None), ("frontend", "Bearer sesame")]
    assert "sesame" not in plain(screen(None, now, width=200, height=60, glyphs=UNICODE, note=""))
    assert "sesame" not in json.dumps(to_json(now, None))


def test_nobody_answers(capsys):
    targets = [f"--{service}={closed_port()}" for service in ("frontend", "core", "worker")]
    assert main([*targets, "--once", "--interval=0.05"]) == 1
    out = capsys.readouterr().out
    assert out.count("connection refused") == 3


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--interval=0", ["--interval", "above 0"]), ("--core=nowhere", ["--core", "must be an address", "nowhere"])],
)
def test_bad_flags_are_named(argument, words, capsys):
    with pytest.raises(SystemExit):
        main([argument])
    message = capsys.readouterr().err
    assert all(word in message for word in words)


def test_tls_files_that_are_not_there(capsys):
    assert main(["--tls-ca-file=nowhere.pem", "--once"]) == 1
    assert "nowhere.pem" in capsys.readouterr().err


def test_other_cores_of_a_frontend_have_a_line_each():
    now = sample()
    others = [
        CoreConnection(f"core:{i}", i != 3, f"{i}" * 32 if i != 3 else "", "model", i, "gone") for i in range(2, 9)
    ]
    assert now.frontend.stats is not None
    cores = (*now.frontend.stats.cores, *others)
    now = replace(now, frontend=replace(now.frontend, stats=replace(now.frontend.stats, cores=cores)))
    lines = [line.plain for line in screen(None, now, width=120, height=40, glyphs=UNICODE, note="")]
    found = [line for line in lines if line.startswith("core ")]
    assert len(lines) <= 40 and len(found) == 5, "the one that is shown, and four"
    assert "2 requests of this frontend" in found[1] and "down" in found[2] and "gone" in found[2]
    assert "and 3 more" in found[4]
    assert sum(line.startswith("a-ra") for line in lines) > 5, "requests have the rest of the screen"
