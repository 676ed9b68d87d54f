"""Plans that are wrong: refused with the column and the row, and nothing has changed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.columns import int32
from pagewire.errors import InternalError, InvalidArgumentError
from pagewire.plan import NewRequest, StepPlan
from pagewire.sampling import SamplingParams
from tests.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, make_runner
from tests.worker.mini_core import GREEDY, MiniCore, request
from tests.worker.tiny_model import MAX_MODEL_LEN, VOCAB_SIZE


def state(batch):
    """Everything that a refused plan must leave alone."""
    slots = np.flatnonzero(batch.is_used)
    return (
        batch.num_tokens.tolist(),
        batch.num_computed_tokens.tolist(),
        batch.num_blocks.tolist(),
        batch.is_used.tolist(),
        batch.is_failed.tolist(),
        [batch.token_ids[s, : batch.num_tokens[s]].tolist() for s in slots],
        [batch.block_tables[s, : batch.num_blocks[s]].tolist() for s in slots],
        [(s, batch.request(s).request_id, batch.sampling.seeds[s]) for s in slots.tolist()],
    )


@pytest.fixture
def ready():
    """A core and a runner with two requests: slot 63 decodes (6 known, 5 computed), slot 62 has 4 of 9 computed."""
    runner = make_runner()
    core = MiniCore(runner.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    first, second = request([1, 2, 3, 4, 5]), request([9, 8, 7, 6, 5, 4, 3, 2, 1], SamplingParams(seed=7))
    core.run([(first, 5), (second, 4)])
    return core, runner, first, second


def new_request(**changes):
    fields = {
        "slot": 0,
        "frontend_incarnation": "f",
        "request_id": 1,
        "token_ids": int32([1, 2]),
        "num_prompt_tokens": 2,
        "sampling_params": GREEDY,
    }
    return NewRequest(**(fields | changes))


BAD = [
    ({"slots": [63]}, "must have one per row"),
    ({"num_scheduled_tokens": [1, 0]}, r"plan.num_scheduled_tokens\[1\] is 0"),
    ({"num_scheduled_tokens": [1, 10**9]}, "max_num_batched_tokens"),
    ({"num_scheduled_tokens": [2, 5]}, r"num_scheduled_tokens\[0\] is 2"),
    ({"num_scheduled_tokens": [1, 4]}, r"num_sampled_tokens\[1\].*must be 0 unless"),
    ({"num_computed_tokens": [4, 4]}, r"num_computed_tokens\[0\] is 4: the worker has 5"),
    ({"num_computed_tokens": [5, 5]}, r"num_computed_tokens\[1\] is 5: the worker has 4"),
    ({"num_sampled_tokens": [2, 1]}, r"num_sampled_tokens\[0\] is 2.*must be 1"),
    ({"num_sampled_tokens": [-1, 1]}, "must be at least 0"),
    ({"num_new_blocks": [0, 1]}, r"new_block_ids.*must have 1"),
    ({"num_new_blocks": [0, 0], "new_block_ids": []}, r"num_new_blocks\[1\].*not enough"),
    ({"new_block_ids": [0, 9]}, r"new_block_ids\[0\] is 0.*null block"),
    ({"new_block_ids": [NUM_BLOCKS, 9]}, "new_block_ids"),
    ({"new_block_ids": [9, 9]}, "two tokens of the step would write"),
    ({"num_new_blocks": [30, 2], "new_block_ids": list(range(50, 82))}, "more than a sequence takes"),
    ({"slots": [63, 64]}, r"slots\[1\] is 64: must be in \[0, 64\)"),
    ({"slots": [63, -1]}, r"slots\[1\] is -1"),
    ({"slots": [63, 5]}, r"slots\[1\] is 5: must be a slot in use"),
    ({"slots": [63, 63]}, r"slots\[1\] is 63: must not come twice"),
    ({"released_slots": [5]}, r"released_slots\[0\] is 5: must be a slot in use"),
    ({"released_slots": [62, 62]}, r"released_slots\[1\] is 62: must not come twice"),
    ({"released_slots": [62]}, r"slots\[1\] is 62: must be a slot in use"),
    ({"released_slots": [999]}, "released_slots"),
    ({"new_requests": [new_request(slot=62)]}, r"new_requests\[0\].slot is 62: must be free"),
    ({"new_requests": [new_request(), new_request()]}, r"new_requests\[1\].slot is 0: must be free"),
    ({"new_requests": [new_request(slot=64)]}, r"new_requests\[0\].slot"),
    ({"new_requests": [new_request(token_ids=int32([]))]}, r"new_requests\[0\].token_ids"),
    ({"new_requests": [new_request(token_ids=int32(range(MAX_MODEL_LEN + 1)))]}, r"new_requests\[0\].token_ids"),
    ({"new_requests": [new_request(num_prompt_tokens=3)]}, r"new_requests\[0\].num_prompt_tokens is 3"),
    ({"num_draft_tokens": [1, 0], "draft_token_ids": [5]}, r"num_sampled_tokens"),
    ({"num_draft_tokens": [1, 0], "draft_token_ids": []}, r"draft_token_ids.*must have 1"),
    ({"num_draft_tokens": [1]}, r"num_draft_tokens.*one per row"),
    ({"copy_sources": [1], "copy_destinations": []}, "copy_destinations"),
    ({"copy_sources": [0], "copy_destinations": [1]}, "copy_sources"),
    ({"copy_sources": [1, 2], "copy_destinations": [3, 3]}, r"copy_destinations\[1\] is 3"),
    ({"zero_block_ids": [NUM_BLOCKS]}, "zero_block_ids"),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_wrong_plan_is_refused_and_changes_nothing(ready, changes, said):
    core, runner, first, second = ready
    rows = [(first, 1), (second, 5)]
    plan = core.plan(rows)
    good = dataclasses.replace(plan)
    for name, value in changes.items():
        setattr(plan, name, value if name == "new_requests" else int32(value))
    before = state(runner.batch)
    with pytest.raises(InvalidArgumentError, match=said):
        runner.execute(plan)
    assert state(runner.batch) == before
    core.take(rows, runner.execute(good))  # the right plan still works
    assert len(first.output) == 2 and len(second.output) == 1


def test_draft_out_of_vocabulary(ready):
    core, runner, first, _ = ready
    plan = core.plan([(first, 2, [VOCAB_SIZE])])
    before = state(runner.batch)
    with pytest.raises(InvalidArgumentError, match=r"draft_token_ids\[0\]"):
        runner.execute(plan)
    assert state(runner.batch) == before


small = st.integers(-2, 70)
column = st.lists(small, max_size=4).map(int32)
params = st.sampled_from(
    [GREEDY, SamplingParams(seed=1), SamplingParams(top_p=-1.0), SamplingParams(seed=1, logprobs=2)]
)


@st.composite
def plans(draw):
    rows = draw(st.integers(0, 3))

    def rows_of(low, high):
        return int32(draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)))

    blocks = rows_of(0, 3)
    plan = StepPlan(
        epoch=1,
        step=1,
        slots=int32(draw(st.lists(st.sampled_from([0, 1, 62, 63, 64]), min_size=rows, max_size=rows))),
        num_scheduled_tokens=rows_of(1, 6),
        num_computed_tokens=rows_of(0, 6),
        num_sampled_tokens=rows_of(0, 2),
        num_new_blocks=blocks,
        new_block_ids=int32(draw(st.lists(st.integers(0, NUM_BLOCKS), min_size=(n := int(blocks.sum())), max_size=n))),
        released_slots=int32(draw(st.lists(st.sampled_from([62, 63, 1]), max_size=2))),
        new_requests=draw(
            st.lists(
                st.builds(
                    NewRequest,
                    slot=st.sampled_from([0, 1, 62, 63]),
                    frontend_incarnation=st.just("f"),
                    request_id=st.integers(0, 2**64 - 1),
                    token_ids=st.lists(st.integers(-1, VOCAB_SIZE), min_size=1, max_size=6).map(int32),
                    num_prompt_tokens=st.integers(1, 6),
                    sampling_params=params,
                    eos_token_ids=st.just((1,)),
                ),
                max_size=2,
            )
        ),
    )
    for name in draw(st.lists(st.sampled_from([f.name for f in dataclasses.fields(StepPlan)]), max_size=2)):
        if isinstance(getattr(plan, name), np.ndarray):
            setattr(plan, name, draw(column))
    return plan


@given(plans())
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_breaks_the_batch(plan):
    """Any plan is executed, or refused without a trace; requests that were there before go on as before."""
    runner = make_runner(num_blocks=NUM_BLOCKS)
    core = MiniCore(runner.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    first, second = request([1, 2, 3, 4, 5]), request([9, 8, 7, 6, 5, 4, 3, 2, 1], SamplingParams(seed=7))
    core.run([(first, 5), (second, 4)])
    before = state(runner.batch)
    try:
        result = runner.execute(plan)
    except InvalidArgumentError:
        assert state(runner.batch) == before
        rows = [(first, 1), (second, 5)]
        core.run(rows)
        assert len(first.output) == 2 and len(second.output) == 1
    except InternalError as error:
        raise AssertionError("a plan got past the checks") from error
    else:
        assert int(result.num_tokens.sum()) == len(result.token_ids)
        assert set(result.slots.tolist()).isdisjoint(result.errors)
        assert (runner.batch.num_computed_tokens <= runner.batch.num_tokens).all()
