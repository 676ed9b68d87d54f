"""Drafts that a device verifies: the step is launched like any other, and its output is that without drafts."""

from __future__ import annotations

import numpy as np
import pytest

from pagewire.errors import InternalError
from pagewire.sampling import SamplingParams
from tests.worker.device_core import (
    PENALIZED,
    PROMPT,
    SAMPLED,
    ahead,
    alone,
    by_slot,
    device_core,
    finish,
    remembered,
    runner_of,
)
from tests.worker.mini_core import GREEDY, request
from tests.worker.tiny_model import POISON
from worker_svc.compute import Deferred
from worker_svc.device_steps import DeviceSteps
from worker_svc.ragged import runs_of_rows
from worker_svc.sampler import LOGITS_SLICE

LOGPROBS = SamplingParams(temperature=0.0, logprobs=2)


def run(core, rows):
    """Starts a step that is launched and takes its result over."""
    result = finish(core.execute(core.plan(rows)))
    core.take(rows, result)
    return result


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_never_change_the_output(params, num_right) -> None:
    core, req, other = device_core(), request(PROMPT, params), request(PROMPT[2:], SAMPLED, child_index=1)
    chunked, expected = request(PROMPT[1:], child_index=2), alone(PROMPT, params, 20)
    run(core, [(req, 8), (other, 6)])
    while len(req.output) < 12:
        done = len(req.output)
        drafts = expected[done : done + 3]
        drafts[num_right:] = [(token + 1) % 90 for token in drafts[num_right:]]
        rows = [(other, 1), (req, 4, drafts)]
        if chunked.computed < 6:
            rows.append((chunked, 2))  # a row that samples nothing
        run(core, rows)
        assert len(req.output) == done + num_right + 1
        run(core, [(req, 1)])
    assert req.output == expected[: len(req.output)]
    assert other.output == alone(PROMPT[2:], SAMPLED, len(other.output), child_index=1)


def test_a_step_with_drafts_takes_the_token_before_them_on_the_device() -> None:
    core, req, other, expected = device_core(), request(PROMPT), request(PROMPT[3:], SAMPLED), alone(PROMPT, GREEDY, 7)
    first = ahead(core, [(req, 8), (other, 5)])
    rows = [(req, 4, [*expected[1:3], 0]), (other, 1)]
    second = core.execute(core.plan(rows))
    assert not first.finish().errors and isinstance(second, Deferred)
    result = second.finish()
    assert result.num_tokens.tolist() == [3, 1] and result.token_ids[:3].tolist() == expected[1:4]
    assert by_slot(first.finish())[req.slot] == expected[0]
    assert result.token_ids[3] == alone(PROMPT[3:], SAMPLED, 2)[1]


@pytest.mark.parametrize("is_finished_first", [True, False])
def test_the_next_plan_is_held_against_what_the_drafts_gave(is_finished_first) -> None:
    core, req, expected = device_core(), request(PROMPT), alone(PROMPT, GREEDY, 6)
    run(core, [(req, 8)])
    rows = [(req, 3, expected[1:3])]
    started = core.execute(core.plan(rows))
    if is_finished_first:
        started.finish()
    req.computed, req.tokens = req.computed + 3, [*PROMPT, *expected[:4]]
    assert by_slot(finish(core.execute(core.plan([(req, 1)]))))[req.slot] == expected[4]
    result = started.finish()
    assert result.token_ids.tolist() == expected[1:4] and result.num_tokens.tolist() == [3]


@pytest.mark.parametrize("where", ["in the step", "in the step before"])
def test_a_row_whose_logits_are_not_numbers_fails(where) -> None:
    core, good = device_core(), request(PROMPT)
    bad = request([4, POISON] if where == "in the step before" else [4, 7])
    first = ahead(core, [(bad, 2), (good, 8)])
    if where == "in the step":
        finish(first)
    drafts = [alone(PROMPT, GREEDY, 2)[1]]
    started = core.execute(core.plan([(bad, 3, [5, POISON]), (good, 2, drafts)]))
    result = finish(started)
    assert list(result.errors) == [bad.slot] and "not numbers" in result.errors[bad.slot]
    assert result.slots.tolist() == [good.slot] and result.token_ids.tolist() == alone(PROMPT, GREEDY, 3)[1:]
    assert runner_of(core).batch.is_failed[bad.slot]
    good.computed, good.tokens = 10, [*PROMPT, *alone(PROMPT, GREEDY, 3)]
    bad.computed = int(runner_of(core).batch.num_computed_tokens[bad.slot])
    assert list(finish(ahead(core, [(bad, 1), (good, 1)])).errors) == [bad.slot]


def test_a_step_behind_drafts_that_fails_leaves_them_alone() -> None:
    core, req, expected = device_core(), request(PROMPT), alone(PROMPT, GREEDY, 6)
    runner = runner_of(core)
    run(core, [(req, 8)])
    started = core.execute(core.plan([(req, 3, expected[1:3])]))
    req.computed, req.tokens = req.computed + 3, [*PROMPT, *expected[:4]]
    back = remembered(core, [req])
    runner.model.fail_with = RuntimeError("out of memory")
    with pytest.raises(InternalError, match="out of memory"):
        ahead(core, [(req, 1)])
    runner.model.fail_with = None
    back()
    assert started.finish().token_ids.tolist() == expected[1:4]
    assert by_slot(finish(ahead(core, [(req, 1)])))[req.slot] == expected[4]


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, LOGPROBS], ids=["launched", "penalized", "logprobs"])
def test_logits_of_many_drafts_exist_some_rows_at_a_time(params, monkeypatch) -> None:
    core, prompts, num_drafts = device_core(max_num_seqs=5), [PROMPT[i:] for i in range(5)], 25
    core.free_slots = list(range(5))
    runner, seen, launches = runner_of(core), [], []
    compute_logits, launch = runner.model.compute_logits, DeviceSteps.launch
    monkeypatch.setattr(runner.model, "compute_logits", lambda h: seen.append(len(h)) or compute_logits(h))
    monkeypatch.setattr(DeviceSteps, "launch", lambda *args: launches.append(1) or launch(*args))
    live = [request(prompt, params) for prompt in prompts]
    execute = (lambda rows: run(core, rows)) if params is GREEDY else core.run
    execute([(req, len(req.tokens)) for req in live])
    expected = [alone(prompt, params, num_drafts + 2) for prompt in prompts]
    rights = [num_drafts, 3, 0, 7, num_drafts]
    rows = []
    for req, tokens, right in zip(live, expected, rights, strict=True):
        wrong = [(token + 1) % 90 for token in tokens[1 + right : 1 + num_drafts]]
        rows.append((req, num_drafts + 1, [*tokens[1 : 1 + right], *wrong]))
    seen.clear()
    result = execute(rows)
    assert [req.output for req in live] == [t[: 2 + n] for t, n in zip(expected, rights, strict=True)]
    assert sum(seen) == 5 * (num_drafts + 1) and max(seen) <= LOGITS_SLICE
    assert result.num_tokens.tolist() == [1 + right for right in rights]
    assert bool(launches) == (params is GREEDY)
    if params is LOGPROBS:
        assert [len(req.logprobs[1].ranks) for req in live] == [1 + right for right in rights]


def test_runs_of_rows() -> None:
    def runs(*counts: int) -> list[tuple[int, int]]:
        return runs_of_rows(np.array(counts, np.int32), 4)

    assert runs(1, 1, 1, 1, 1) == [(0, 4), (4, 5)]
    assert runs(2, 3, 0, 1, 9, 0, 4) == [(0, 1), (1, 4), (4, 5), (5, 7)]
    assert runs(0, 0) == [(0, 2)] and runs() == []
