"""Logits processors of rows, one by one and together, against a naive pipeline; a row without any pays nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.penalties import reference_bitmask, reference_output_penalties, reference_repetition_penalty
from kernels.sampling import reference_sample
from pagewire.columns import int32
from pagewire.plan import NewRequest
from pagewire.sampling import SamplingParams
from tests.worker.mini_core import GREEDY, request
from tests.worker.tiny_model import VOCAB_SIZE, reference_logits
from worker_svc import processors, sampler
from worker_svc.processors import RowContext, apply_processors
from worker_svc.slot_request import slot_request

token = st.integers(0, VOCAB_SIZE - 1)
tokens = st.lists(token, max_size=12)


def row_context(params, prompt, output, eos=(), mask=None):
    new = NewRequest(0, "f", 1, int32([*prompt, *output]), len(prompt), params, eos_token_ids=eos)
    made = slot_request(new, VOCAB_SIZE)
    assert made.error == ""
    return RowContext(made, int32([*prompt, *output]), mask)


def naive(logits, params, prompt, output, eos=(), mask=None):
    """One row, step by step."""
    x = list(logits)
    if mask is not None:
        x = reference_bitmask(x, mask)
    x = [v + params.logit_bias.get(i, 0.0) for i, v in enumerate(x)]
    if params.allowed_token_ids:
        x = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    for *start, end in params.bad_words_token_ids:
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            x[end] = -math.inf
    if len(output) < params.min_tokens:
        for stop in (*eos, *params.stop_token_ids):
            x[stop] = -math.inf
    x = reference_repetition_penalty(x, [*prompt, *output], params.repetition_penalty)
    return reference_output_penalties(x, output, params.frequency_penalty, params.presence_penalty)


all_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4),
    allowed_token_ids=st.one_of(st.just(()), st.lists(token, min_size=1, max_size=5).map(tuple)),
    bad_words_token_ids=st.lists(st.lists(token, min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
    min_tokens=st.sampled_from([0, 3, 100]),
    max_tokens=st.just(200),
    stop_token_ids=st.lists(token, max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 2.0]),
)
rows = st.lists(
    st.tuples(all_params, st.lists(token, min_size=1, max_size=8), tokens, st.sampled_from([(), (3,), (3, 4)])),
    min_size=1,
    max_size=5,
)
words = st.one_of(st.none(), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4))


@given(rows, words, st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_all_together_equal_the_naive_pipeline(rows, mask, seed):
    logits = torch.randn((len(rows), VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 4
    expected = [
        naive(x.tolist(), params, prompt, output, eos, mask)
        for x, (params, prompt, output, eos) in zip(logits, rows, strict=True)
    ]
    packed = None if mask is None else int32(mask)
    apply_processors(logits, [row_context(*row, mask=packed) for row in rows])
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-5, rtol=1e-5)


ONE_BY_ONE = {
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={4: 100.0, 7: -100.0}),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=(5, 6, 90)),
    "bad_words": SamplingParams(temperature=0.0, bad_words_token_ids=((10,), (11, 12))),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(1, 2)),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.8),
    "presence": SamplingParams(temperature=0.0, presence_penalty=2.0),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=2.0),
    "with_noise": SamplingParams(temperature=1.5, top_k=20, seed=9, repetition_penalty=1.2, presence_penalty=1.0),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_generation_with_one_processor_equals_the_naive_one(core, runner, name):
    """Beside a plain request in every step, whose output does not change."""
    params, prompt, eos = ONE_BY_ONE[name], [5, 17, 3, 88, 41], (94, 4)
    req, plain = request(prompt, params, eos=eos), request(prompt)
    core.generate([req, plain], 12)
    output, greedy = [], []
    for _ in range(12):
        x = reference_logits(runner.model, prompt + output)[-1].tolist()
        options = {"temperature": params.temperature, "top_k": params.top_k, "seed": params.seed or 0}
        output.append(reference_sample(naive(x, params, prompt, output, eos), position=len(prompt + output), **options))
        greedy.append(int(reference_logits(runner.model, prompt + greedy)[-1].argmax()))
    assert req.output == output
    assert plain.output == greedy


def test_min_tokens_holds_back_stops_until_they_are_there(core, runner):
    """Case: vllm#21987"""
    prompt, banned = [5, 17, 3, 88, 41], tuple(range(50))
    req = request(prompt, SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=banned))
    core.generate([req], 8)
    assert min(req.output[:3]) >= 50
    free = int(reference_logits(runner.model, prompt + req.output[:3])[-1].argmax())
    assert req.output[3] == free


def test_rows_with_default_parameters_skip_all_the_work(core, monkeypatch):
    monkeypatch.setattr(sampler, "apply_processors", None)
    monkeypatch.setattr(sampler, "logprob_columns", None)
    monkeypatch.setattr(sampler.kernels, "sample", None)
    req = request([1, 2, 3], GREEDY, eos=(7,))
    assert len(core.generate([req], 3)[0]) == 3


def test_only_rows_that_need_a_processor_pay(core, monkeypatch):
    seen = []
    real = processors.apply_processors
    monkeypatch.setattr(sampler, "apply_processors", lambda logits, rows: (seen.append(len(rows)), real(logits, rows)))
    requests = [request([1, 2, i]) for i in range(5)] + [
        request([4], SamplingParams(temperature=0.0, logit_bias={1: 1.0}))
    ]
    core.run([(req, len(req.tokens)) for req in requests])
    assert seen == [1]
