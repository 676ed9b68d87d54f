"""A step's log-probabilities fit its messages, whoever asks for how many."""

from __future__ import annotations

import pytest
from core_support import Harness, assert_engine_empty, expected_tokens, make_request, params

from core_svc.fake_executor import FakeOptions
from core_svc.fake_model import FakeModel
from pagewire.errors import InvalidArgumentError
from pagewire.sampling import SamplingParams

VOCAB = 1000
ROOM = 1500


def candidates_by_step(harness: Harness) -> list[int]:
    """What the worker would have to send, from the plans alone."""
    found = []
    for step in harness.steps:
        num, plan = 0, step.plan
        for row, request in enumerate(step.requests):
            first = int(plan.num_computed_tokens[row]) + 1
            end = min(first + int(plan.num_scheduled_tokens[row]), request.num_prompt_tokens)
            asked: SamplingParams = request.sampling_params
            num += max(0, end - first) * asked.prompt_logprob_width(VOCAB)
            num += int(plan.num_sampled_tokens[row]) * asked.logprob_width(VOCAB)
        found.append(num)
    return found


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_blocks", [200, 24])
def test_greedy_askers_share_the_room_and_nobody_fails_or_starves(num_drafts: int, num_blocks: int) -> None:
    """Whole vocabularies of many requests come out over many steps; who asks for little or nothing ends too."""
    harness = Harness(
        num_blocks=num_blocks,
        block_size=4,
        max_logprob_candidates=ROOM,
        max_num_batched_tokens=64,
        model=FakeModel(vocab_size=VOCAB, eos_token_id=2),
        options=FakeOptions(num_drafts=num_drafts),
    )
    asked = [
        make_request(0, 20, params(6, prompt_logprobs=-1)),
        make_request(1, 12, params(6, logprobs=-1)),
        make_request(2, 12, params(6, prompt_logprobs=100, logprobs=-1)),
        make_request(3, 12, params(6, logprobs=5, logprob_token_ids=(1, 2, 3))),
        make_request(4, 12, params(6)),
    ]
    harness.add(*asked)
    harness.run()
    assert max(candidates_by_step(harness)) <= ROOM
    for request in asked:
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    positions = [
        position for start, columns in harness.of(0).prompt_logprobs for position in range(start, start + len(columns))
    ]
    assert positions == list(range(1, 20))
    assert_engine_empty(harness)


def test_requests_without_log_probabilities_are_scheduled_as_ever() -> None:
    harness = Harness(max_logprob_candidates=1, max_num_batched_tokens=64)
    harness.add(*(make_request(i, 30, params(2)) for i in range(4)))
    harness.step()
    assert harness.plans[0].num_scheduled_tokens.tolist() == [30, 30, 4]
    harness.run()
    assert_engine_empty(harness)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_one_position_that_has_no_room_is_refused(name: str) -> None:
    harness = Harness(max_logprob_candidates=100, model=FakeModel(vocab_size=VOCAB, eos_token_id=2))
    with pytest.raises(InvalidArgumentError, match=rf"requests\[0\]\.sampling_params\.{name}.*at most 100 candidates"):
        harness.add(make_request(1, 5, params(2, **{name: -1})))
    harness.add(make_request(1, 5, params(2, **{name: 99})))
    harness.run()
    assert_engine_empty(harness)
