"""Commands, aborts and deadlines in any order over a small pool: each is answered, and nothing is left over."""

from __future__ import annotations

import random

import pytest
from core_support import EOS, FRONTEND, Harness, assert_engine_empty, expected_tokens, make_request, params

from core_svc.fake_executor import FakeOptions
from core_svc.fake_model import FakeModel
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from pagewire.engine import (
    AbortReason,
    Command,
    EngineRequest,
    FinishReason,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)

COMMANDS: list[Command] = [
    ResetPrefixCache(),
    ResetPrefixCache(preempt_running=True),
    Sleep(1),
    Sleep(2),
    WakeUp(),
    WakeUp(),
    Pause(PauseMode.KEEP),
    Pause(PauseMode.WAIT, reset_prefix_cache=True),
    Pause(PauseMode.ABORT),
    *[Resume()] * 4,
]


def some_request(chance: random.Random, request_id: int) -> EngineRequest:
    """Few different tokens, so that prefixes are shared; now and then log-probabilities or a deadline."""
    asked = params(chance.randint(1, 10), **chance.choice([{}, {}, {"logprobs": -1}, {"prompt_logprobs": -1}]))
    prompt = [chance.choice([7, 8, 9])] * chance.randint(1, 14)
    remaining_ms = chance.choice([None, None, 2**50, 0])
    return make_request(request_id, prompt, asked, priority=chance.randint(-1, 1), remaining_ms=remaining_ms)


def replay(events: list[KvEvent], found: set[bytes]) -> None:
    for event in events:
        match event:
            case BlockStored():
                assert not found.intersection(event.block_hashes)
                found.update(event.block_hashes)
            case BlockRemoved():
                assert found.issuperset(event.block_hashes)
                found.difference_update(event.block_hashes)
            case AllBlocksCleared():
                found.clear()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_everything_at_once(seed: int, async_scheduling: bool) -> None:
    chance = random.Random(seed)
    harness = Harness(
        record_events=True,
        async_scheduling=async_scheduling,
        num_blocks=chance.choice([8, 10, 16]),
        block_size=4,
        max_num_seqs=chance.choice([2, 4, 8]),
        max_num_batched_tokens=chance.choice([5, 16, 64]),
        policy=chance.choice(["fcfs", "priority"]),
        prefill_schedule_interval=chance.choice([1, 3]),
        max_logprob_candidates=chance.choice([2**22, 1100]),
        model=FakeModel(vocab_size=1000, eos_token_id=EOS),
        options=FakeOptions(num_drafts=chance.choice([0, 2]), seed=seed),
    )
    asked: list[EngineRequest] = []
    answers, found = [], set[bytes]()
    for _ in range(250):
        dice = chance.random()
        if dice < 0.25:
            asked.append(some_request(chance, len(asked)))
            harness.add(asked[-1])
        elif dice < 0.38:
            answers.append(harness.engine.utility(chance.choice(COMMANDS)))
        elif dice < 0.45:
            harness.engine.abort(FRONTEND, [chance.randrange(len(asked) + 1)], AbortReason.CLIENT)
        harness.step()
        replay(harness.events, found)
        harness.events.clear()
        assert found == set(harness.scheduler.kv.pool.cached_blocks), "a mirror made from the events is the pool's"
    harness.engine.utility(WakeUp())
    harness.engine.utility(Resume())
    harness.run()
    assert all(answer.done() for answer in answers)
    for request in asked:
        got, expected = harness.of(request.request_id), expected_tokens(harness, request)
        assert got.tokens == expected[: len(got.tokens)]
        if got.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got.tokens == expected
    assert_engine_empty(harness)
