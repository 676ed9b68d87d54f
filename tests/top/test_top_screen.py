"""`pagewire top` against a deployment under load: what a terminal shows is what the RPCs say."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator

import pytest

from core_svc.scheduler import PauseState
from pagewire.engine import Pause, PauseMode, Resume
from pagewire.top.client import Deployment
from pagewire.top.data import Sample, block_counts
from tests.top.conftest import Terminal, top
from tests.top.top_support import SECRET, SmallDeployment

OpenTerminal = Callable[..., Terminal]


def look(deployment: SmallDeployment) -> Sample:
    """What the RPCs say now."""

    async def ask() -> Sample:
        asked = Deployment({"frontend": deployment.frontend_target})
        try:
            return await asked.look()
        finally:
            await asked.close()

    return asyncio.run(ask())


@pytest.fixture
def loaded(deployment: SmallDeployment) -> Iterator[SmallDeployment]:
    """Six run, of which two are one request's; three wait; the first step's prompts take several steps."""
    deployment.send("long", num_prompt=150, max_tokens=3000)
    deployment.send("twins", num_prompt=20, max_tokens=3000, n=2)
    deployment.send("secret", num_prompt=0, max_tokens=3000, priority=5)
    for i in range(5):
        deployment.send(f"client\x1b[31m-{i}", num_prompt=40 + i, max_tokens=3000)
    engine = deployment.core.engine
    deadline = time.monotonic() + 10
    while len(engine.scheduler.requests) < 9 or engine.scheduler.num_running < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield deployment
    engine.utility(Resume()).result(5)
    engine.utility(Pause(PauseMode.ABORT)).result(5)
    engine.utility(Resume()).result(5)


def pause(deployment: SmallDeployment) -> None:
    """Freezes every request where it is."""
    deployment.core.engine.utility(Pause(PauseMode.KEEP)).result(10)
    assert deployment.core.engine.scheduler.pause_state is PauseState.FROZEN


def numbers_of(lines: list[str], first_word: str) -> list[str]:
    """The words of the line that begins so."""
    return next(line for line in lines if line.startswith(first_word)).split()


def request_rows(lines: list[str]) -> list[list[str]]:
    """The words of the rows below the header of requests, without their ages."""
    start = next(i for i, line in enumerate(lines) if line.startswith("REQUEST "))
    rows = [line.split() for line in lines[start + 1 :] if line.strip()]
    return [row[:2] + row[3:] for row in rows]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 48)])
def test_the_screen_shows_what_the_rpcs_say(
    loaded: SmallDeployment, open_terminal: OpenTerminal, width: int, height: int
) -> None:
    terminal = open_terminal(width, height, f"--frontend={loaded.frontend_target}", "--interval=0.2")
    terminal.wait_for(lambda lines: any(re.match(r"per second +[1-9]", line) for line in lines))
    before = look(loaded)
    time.sleep(0.5)
    lines = terminal.capture()
    after = look(loaded)
    assert before.core.stats is not None and after.core.stats is not None
    tokens, computed, _, steps = (int(word) for word in numbers_of(lines, "in all")[2:6])
    assert before.core.stats.num_generated_tokens <= tokens <= after.core.stats.num_generated_tokens
    assert before.core.stats.num_scheduled_tokens <= computed <= after.core.stats.num_scheduled_tokens
    assert before.core.stats.num_steps <= steps <= after.core.stats.num_steps
    pause(loaded)
    now = look(loaded)
    stats = now.core.stats
    assert stats is not None
    lines = terminal.wait_for(lambda found: numbers_of(found, "in all")[5] == str(stats.num_steps))
    lines = terminal.wait_for(lambda found: numbers_of(found, "per second")[2] == "0.0")
    assert len(lines) <= height and max(map(len, lines)) <= width
    in_all = [stats.num_generated_tokens, stats.num_scheduled_tokens, stats.num_finished, stats.num_steps]
    assert numbers_of(lines, "in all")[2:6] == [str(number) for number in in_all]
    _check_services(lines, loaded, now)
    _check_requests(lines, now, has_all_columns=width >= 160)
    counts = block_counts(now.detail)
    assert counts is not None and counts.used and counts.free
    for name in ("free", "cached", "used", "shared"):
        assert any(f" {getattr(counts, name)} {name}" in line for line in lines if "KV cache" in line)
    _check_steps(lines, now)
    assert SECRET.split()[-1] not in "\n".join(lines)
    terminal.press("C-c")
    lines = terminal.wait_for(lambda found: "after: 0" in found)
    assert [line for line in lines if line] == ["before", "after: 0"]


def _check_services(lines: list[str], deployment: SmallDeployment, now: Sample) -> None:
    targets = (deployment.frontend_target, deployment.core_target, deployment.worker_target)
    for service, target in zip(("frontend", "core", "worker"), targets, strict=True):
        assert numbers_of(lines, service)[1:3] == ["ready", target]
    assert now.detail.process.incarnation[:6] in numbers_of(lines, "core")


def _check_requests(lines: list[str], now: Sample, *, has_all_columns: bool) -> None:
    columns, rows = now.detail.requests, request_rows(lines)
    assert columns.num_total == 9
    assert any("6 running, 3 waiting" in line for line in lines)
    assert rows and len(rows) == min(len(rows), 9)
    for i, row in enumerate(rows):
        shown = [columns.priorities, columns.num_prompt_tokens, columns.num_output_tokens]
        shown += [columns.max_num_tokens - columns.num_prompt_tokens]
        if has_all_columns:
            shown += [columns.num_draft_tokens, columns.num_placeholder_tokens]
        shown += [columns.num_computed_tokens, columns.debts, columns.num_blocks]
        if has_all_columns:
            shown += [columns.num_cached_tokens, columns.num_preemptions]
        assert row[1] == ("running" if i < 6 else "waiting")
        assert row[2:] == [str(column[i]) for column in shown]
    names = [row[0] for row in rows]
    assert "\x1b" not in "".join(names)
    if has_all_columns:
        assert {"long", "twins/0", "twins/1", "secret", "client\\x1b[31m-0"} <= set(names)


def _check_steps(lines: list[str], now: Sample) -> None:
    steps = now.detail.steps
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["STEP", "AGE"])
    for i in (1, 2):
        row = lines[start + i].split()
        scheduled, prefill = int(steps.num_scheduled_tokens[-i]), int(steps.num_prefill_tokens[-i])
        assert row[0] == str(steps.numbers[-i])
        assert row[2:6] == [str(n) for n in (steps.num_requests[-i], scheduled, prefill, scheduled - prefill)]
        assert float(row[7]) == pytest.approx(steps.execute_us[-i] / 1000, rel=0.01, abs=0.006)


def test_json_and_plain_text_for_scripts(loaded: SmallDeployment) -> None:
    pause(loaded)
    now = look(loaded)
    assert now.core.stats is not None
    arguments = (f"--frontend={loaded.frontend_target}", "--once", "--interval=0.1")
    done = top(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    debts = now.detail.requests.debts.tolist()
    assert [row["debt"] for row in found["requests"]] == debts
    assert [row["external_request_id"] for row in found["requests"]] == now.detail.requests.external_request_ids
    assert {row["state"] for row in found["requests"]} == {"running", "waiting"}
    assert [row["number"] for row in found["steps"]] == now.detail.steps.numbers.tolist()
    assert found["services"]["core"]["stats"]["num_steps"] == now.core.stats.num_steps
    assert found["services"]["worker"]["stats"]["num_slots_used"] == 3
    assert found["services"]["frontend"]["stats"]["num_received"] >= 8
    assert found["rates"]["generated_tokens"] == 0
    assert sum(found["blocks"][name] for name in ("free", "cached", "used", "shared")) == found["blocks"]["num_blocks"]
    assert SECRET.split()[-1] not in done.stdout
    plain = top(*arguments[:1], arguments[2])
    assert plain.returncode == 0
    assert "\x1b" not in plain.stdout
    rows = request_rows(plain.stdout.splitlines())
    assert [int(row[-2]) for row in rows] == debts


def test_an_abort_is_counted_and_leaves_the_screen(deployment: SmallDeployment) -> None:
    before = look(deployment).frontend.stats
    deployment.send("gone", num_prompt=10, max_tokens=3000)
    engine = deployment.core.engine
    deadline = time.monotonic() + 10
    while not engine.scheduler.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    async def abort() -> None:
        deployment.service.abort(["gone"])

    deployment.run(abort())
    while engine.scheduler.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    now = look(deployment)
    after = now.frontend.stats
    assert before is not None and after is not None
    assert after.num_aborted == before.num_aborted + 1
    assert after.num_received == before.num_received + 1
    assert after.num_prompt_tokens == before.num_prompt_tokens + 10
    assert now.detail.requests.num_total == 0
