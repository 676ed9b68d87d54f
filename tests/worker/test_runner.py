"""Steps on a tiny model: chunks, batches, slots, blocks, drafts, prompt log-probabilities, failures."""

import math

import numpy as np
import pytest
import torch

from pagewire.columns import int32
from pagewire.errors import InternalError, InvalidArgumentError
from pagewire.plan import GrammarMask
from pagewire.sampling import SamplingParams
from tests.worker.mini_core import GREEDY, request
from tests.worker.tiny_model import MAX_MODEL_LEN, POISON, VOCAB_SIZE, reference_logits

PROMPT = [5, 17, 3, 88, 41, 9, 2, 60, 33, 71, 12, 28, 7]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=2**63 + 77)


def reference_greedy(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 10**9])
def test_chunks_do_not_change_the_output(core, runner, budget):
    expected = reference_greedy(runner.model, PROMPT, 12)
    assert core.generate([request(PROMPT)], 12, budget) == [expected]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(temperature=1.3, top_k=9, min_p=0.02, seed=4)])
def test_batch_equals_alone(new_core, params):
    """Case: vllm#5898"""
    prompts = [[*PROMPT[i % 5 :], i] for i in range(12)]
    alone = [new_core().generate([request(p, params, child_index=i)], 10)[0] for i, p in enumerate(prompts)]
    requests = [request(p, params, child_index=i) for i, p in enumerate(prompts)]
    assert new_core().generate(requests, 10, budget=23) == alone


def test_preempted_and_resumed_request_samples_the_same(new_core):
    """Case: vllm#48245"""
    expected = new_core().generate([request(PROMPT, SAMPLED)], 14)[0]
    core = new_core()
    req = request(PROMPT, SAMPLED)
    core.generate([req], 6)
    core.release(req)
    other = request([1, 2, 3, 4, 5, 6, 7, 8, 9])  # takes the slot and the blocks in the same plan
    core.run([(other, 9)])
    assert core.generate([req, other], 14, budget=7)[0] == expected


def test_released_and_reused_slot_in_one_plan(core, runner):
    first, second = request(PROMPT), request([50, 51, 52])
    core.generate([first], 3)
    slot = first.slot
    core.release(first)
    core.run([(second, 3)])
    assert second.slot == slot
    assert core.generate([second], 8) == [reference_greedy(runner.model, [50, 51, 52], 8)]


def test_shared_prefix_blocks(core, runner):
    """Case: vllm#5543"""
    first = request(PROMPT)
    core.run([(first, len(PROMPT))])
    second = request([*PROMPT[:8], 90, 91])
    second.blocks, second.computed = first.blocks[:2], 8  # 2 blocks of 4 tokens
    core.run([(first, 1), (second, 2)])
    assert core.generate([second], 6)[0] == reference_greedy(runner.model, [*PROMPT[:8], 90, 91], 6)


def test_block_copies_and_zeros_come_before_writes(core, runner):
    first = request(PROMPT[:4])
    core.run([(first, 4)])
    source, copy = first.blocks[0], core.free_blocks.pop()
    second = request([*PROMPT[:4], 20])
    second.blocks, second.computed = [copy], 4
    zeroed = core.free_blocks[-1]
    runner.pool.caches[0][0][zeroed] = 1.0
    runner.pool.caches[0][0][copy] = math.nan
    core.run(
        [(second, 1)],
        copy_sources=int32([source]),
        copy_destinations=int32([copy]),
        zero_block_ids=int32([zeroed]),
    )
    assert second.blocks[1] == zeroed
    # Keys lie [kv_heads, head_size, block_size, 1] in a block: every slot but the first, which the step has written.
    assert float(runner.pool.caches[0][0][zeroed][:, :, 1:].abs().sum()) == 0.0
    assert second.output == reference_greedy(runner.model, [*PROMPT[:4], 20], 1)


def test_empty_plan_only_releases(core, runner):
    req = request(PROMPT)
    core.generate([req], 2)
    core.release(req)
    result = core.run([])
    assert runner.batch.num_slots_used == 0 and not len(result.slots) and not result.errors


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_drafts_never_change_the_output(new_core, params, num_right):
    """Drafts are accepted while they equal what is sampled; rejected ones leave no trace."""
    expected = new_core().generate([request(PROMPT, params)], 16)[0]
    core = new_core()
    req, other = request(PROMPT, params), request(PROMPT[2:], params)
    core.generate([req, other], 1)
    emitted = []
    while len(req.output) < 12:
        done = len(req.output)
        drafts = expected[done : done + 3]
        drafts[num_right:] = [(t + 1) % 90 for t in drafts[num_right:]]
        core.run([(other, 1), (req, 4, drafts)])
        emitted.append(len(req.output) - done)
    assert req.output == expected[: len(req.output)]
    assert set(emitted) == {num_right + 1}


def test_prompt_logprobs_are_exact_at_chunk_boundaries(new_core):
    """Case: vllm#14239"""
    params = SamplingParams(temperature=0.0, prompt_logprobs=3, max_tokens=4)
    for budget in (1, 2, 5, 100):
        core = new_core()
        req, noise = request(PROMPT, params), request(PROMPT[::-1])
        core.generate([noise, req], 3, budget=budget if budget > 1 else 2)
        positions = [start + i for start, columns in req.prompt_logprobs for i in range(len(columns))]
        assert positions == list(range(1, len(PROMPT)))
        logits = reference_logits(core.execute.__self__.model, PROMPT)
        expected = torch.log_softmax(logits, dim=-1)
        for start, columns in req.prompt_logprobs:
            for i in range(len(columns)):
                p = start + i
                row = expected[p - 1]
                assert columns.token_ids[i, 0] == PROMPT[p]
                assert columns.logprobs[i, 0] == pytest.approx(float(row[PROMPT[p]]), rel=1e-4, abs=1e-4)
                assert columns.ranks[i] == 1 + int((row > row[PROMPT[p]]).sum())
                assert columns.token_ids[i, 1:].tolist() == row.topk(3).indices.tolist()


def test_prompt_logprobs_start_where_the_core_says(core):
    """A preempted request gets each position once."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    req = request(PROMPT, params, prompt_logprobs_start=7)
    core.run([(req, 5)])
    assert req.prompt_logprobs == []
    core.run([(req, len(PROMPT) - 5)])
    assert [(start, len(columns)) for start, columns in req.prompt_logprobs] == [(7, len(PROMPT) - 7)]


def test_logprobs_are_of_the_models_own_distribution(core, runner):
    params = SamplingParams(temperature=0.7, seed=3, logprobs=4, logit_bias={8: 50.0}, logprob_token_ids=(8, 9))
    req = request(PROMPT, params)
    core.generate([req], 3)
    assert req.output == [8, 8, 8]
    for i, columns in enumerate(req.logprobs):
        row = torch.log_softmax(reference_logits(runner.model, req.tokens[: len(PROMPT) + i])[-1], dim=-1)
        order = row.topk(4).indices.tolist()
        assert columns.token_ids.tolist() == [[8, *order, 8, 9]]
        np.testing.assert_allclose(columns.logprobs[0], row[columns.token_ids[0]].numpy(), atol=1e-4, rtol=1e-4)
        assert columns.ranks.tolist() == [1 + int((row > row[8]).sum())]


def test_logprobs_of_the_whole_vocabulary(core):
    req = request(PROMPT, SamplingParams(temperature=0.0, logprobs=-1))
    core.generate([req], 1)
    columns = req.logprobs[0]
    assert columns.token_ids.shape == (1, VOCAB_SIZE + 1)
    assert sorted(columns.token_ids[0, 1:].tolist()) == list(range(VOCAB_SIZE))
    assert (np.diff(columns.logprobs[0, 1:]) <= 0).all()


def test_a_row_with_nan_fails_alone_and_stays_failed(core, runner):
    good, bad = request(PROMPT), request([1, 2, POISON])
    core.run([(good, len(PROMPT)), (bad, 3)])
    assert "not numbers" in bad.error and bad.output == [] and not good.error
    # A core that planned ahead sends the row once more.
    result = core.run([(good, 1), (bad, 1)], num_computed_tokens=int32([len(PROMPT), 3]))
    assert list(result.errors) == [bad.slot] and result.slots.tolist() == [good.slot]
    core.release(bad)
    fresh = request([4, 5, 6])
    core.run([(good, 1), (fresh, 3)])
    assert good.output == reference_greedy(runner.model, PROMPT, 3)
    assert fresh.output == reference_greedy(runner.model, [4, 5, 6], 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"params": SamplingParams(top_p=0.0, seed=1)}, "sampling_params.top_p"),
        ({"params": SamplingParams(logit_bias={VOCAB_SIZE: 1.0}, seed=1)}, "logit_bias"),
        ({"params": SamplingParams(seed=None)}, "sampling_params.seed"),
        ({"tokens": [1, VOCAB_SIZE, 2]}, "token_ids[1]"),
        ({"eos": (-1,)}, "eos_token_ids[0]"),
    ],
)
def test_a_bad_request_fails_alone(core, runner, changes, said):
    """Case: vllm#16529"""
    good, bad = request(PROMPT), request([1, 2, 3])
    for name, value in changes.items():
        setattr(bad, name, value)
    core.run([(good, len(PROMPT)), (bad, 3)])
    assert said in bad.error
    assert good.output == reference_greedy(runner.model, PROMPT, 1)


def test_a_row_whose_tokens_are_all_forbidden_fails_alone(core):
    params = SamplingParams(temperature=1.0, seed=1, allowed_token_ids=(4,), bad_words_token_ids=((4,),))
    good, bad = request(PROMPT), request([1, 2, 3], params)
    core.run([(good, len(PROMPT)), (bad, 3)])
    assert "forbid every token" in bad.error and len(good.output) == 1


def test_a_failed_forward_pass_has_not_happened(core, runner):
    first, second = request(PROMPT), request([30, 31, 32, 33])
    core.generate([first, second], 4)
    core.release(second)
    third = request([60, 61])
    runner.model.fail_with = RuntimeError("out of memory")
    rows = [(first, 1), (third, 2)]
    plan = core.plan(rows)
    with pytest.raises(InternalError, match="out of memory"):
        runner.execute(plan)
    assert runner.batch.num_slots_used == 2
    runner.model.fail_with = None
    core.take(rows, runner.execute(plan))  # the same plan, as if nothing had been
    core.generate([first, third], 7)
    assert first.output == reference_greedy(runner.model, PROMPT, 7)
    assert third.output == reference_greedy(runner.model, [60, 61], 7)


def test_up_to_the_longest_sequence(core, runner):
    prompt = [(7 * i) % 90 for i in range(MAX_MODEL_LEN - 2)]
    req = request(prompt)
    core.run([(req, len(prompt))])
    core.run([(req, 1)])
    core.run([(req, 1)])  # computes the last place; what it samples is the model's length plus one
    assert len(req.tokens) == MAX_MODEL_LEN + 1
    with pytest.raises(InvalidArgumentError, match="max_model_len"):
        core.run([(req, 1)])


def mask_words(allowed):
    words = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def test_grammar_mask_is_applied_to_its_slot_only(core, runner):
    free, bound = request(PROMPT), request(PROMPT)
    rows = [(free, len(PROMPT)), (bound, len(PROMPT))]
    plan = core.plan(rows, awaits_grammar_mask=True)
    calls = []

    def mask():
        calls.append(runner.num_progress)  # only now: the forward pass is over
        return GrammarMask(plan.epoch, plan.step, int32([bound.slot]), int32([1]), mask_words([31, 32, 95]))

    before = runner.num_progress
    core.take(rows, runner.execute(plan, mask))
    assert calls[0] >= before + len(runner.model.layers)
    logits = reference_logits(runner.model, PROMPT)[-1]
    assert free.output == [int(logits.argmax())]
    assert bound.output == [max([31, 32, 95], key=lambda t: float(logits[t]))]


def test_grammar_masks_with_drafts(core, runner):
    req = request(PROMPT)
    core.generate([req], 1)
    truth = reference_greedy(runner.model, PROMPT, 3)
    rows = [(req, 3, truth[1:3])]
    plan = core.plan(rows, awaits_grammar_mask=True)
    other = (truth[2] + 1) % 90
    masks = np.concatenate([mask_words([truth[1]]), mask_words([other]), mask_words([1])])
    result = runner.execute(plan, lambda: GrammarMask(1, plan.step, int32([req.slot]), int32([3]), masks))
    core.take(rows, result)
    assert req.output == [truth[0], truth[1], other]  # the second draft is not what the grammar lets through


@pytest.mark.parametrize(
    "change", [{"step": 99}, {"slots": int32([5])}, {"num_mask_rows": int32([2])}, {"mask": int32([1])}]
)
def test_wrong_grammar_mask_fails_the_step(core, runner, change):
    req = request(PROMPT)
    plan = core.plan([(req, len(PROMPT))], awaits_grammar_mask=True)
    mask = GrammarMask(plan.epoch, plan.step, int32([req.slot]), int32([1]), mask_words([1]))
    for name, value in change.items():
        setattr(mask, name, value)
    with pytest.raises(InvalidArgumentError, match="grammar_mask"):
        runner.execute(plan, lambda: mask)
    assert runner.batch.num_slots_used == 0
