"""SmolLM2's output against transformers, and against itself: whatever the budget, cache, pool, batch or order.

In float32. Two tokens whose scores lie within NEAR_TIE of each other may stand for one another (DESIGN.md, invariant 5:
a product over one row and over many differs in the last bits); everything else must be identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from prompts import LONG, PROMPTS
from reference import NEAR_TIE, Reference

from frontend_svc import LLM, SamplingParams
from frontend_svc.inprocess import WorkerExecutor
from kernels.philox import gumbel_noise
from worker_svc.fetch import resolve_model
from worker_svc.worker import Worker

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
SEED = 2**63 + 7
SAMPLED = SamplingParams(temperature=0.8, top_k=50, seed=SEED, max_tokens=NUM_TOKENS)
MakeLLM = Callable[..., LLM]
Outputs = list[list[int]]

# The tests of this file share one model and run one engine after another on it.
VARIANTS: dict[str, dict[str, object]] = {
    "budget 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "budget 100, threshold 33": {"max_num_batched_tokens": 100, "long_prefill_token_threshold": 33},
    "no prefix cache": {"enable_prefix_caching": False},
    "batch 1": {"max_num_seqs": 1},
    "batch 32": {"max_num_seqs": 32},
    "blocks of 5": {"block_size": 5},
    "a pool that preempts": {"num_kv_blocks": 24},
    "priority": {"policy": "priority"},
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    return Reference(path)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    found = [reference.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert len(found) >= 24 and min(map(len, found)) == 1
    long = PROMPTS.index(LONG)
    found[long] = found[long][:1500]
    assert len(found[long]) == 1500
    return found


@pytest.fixture(scope="module")
def make_llm() -> MakeLLM:
    """Makes an LLM over the one worker of this module; the one before must be closed."""
    worker = Worker()

    def make(**options: object) -> LLM:
        if worker.model is not None:
            worker.sleep(1)  # on a CPU this drops the KV pool and nothing else
            worker.wake_up()
        return LLM("smollm2", dtype="float32", executor=WorkerExecutor(worker), **options)  # type: ignore[arg-type]

    return make


def run(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams], **options: object
) -> Outputs:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)  # type: ignore[arg-type]
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_both(llm: LLM, prompts: Sequence[list[int]], **options: object) -> dict[str, Outputs]:
    """Every prompt twice in one batch, greedy and sampled."""
    params = [GREEDY] * len(prompts) + [SAMPLED] * len(prompts)
    outputs = run(llm, [*prompts, *prompts], params, **options)
    return {"greedy": outputs[: len(prompts)], "sampled": outputs[len(prompts) :]}


@pytest.fixture(scope="module")
def few(prompts: list[list[int]]) -> list[list[int]]:
    """Every third prompt and a part of the long one: enough to batch, chunk and preempt."""
    return [*prompts[:-1:3], prompts[-1][:200]]


@pytest.fixture(scope="module")
def greedy(make_llm: MakeLLM, prompts: list[list[int]]) -> Outputs:
    with make_llm() as llm:
        return run(llm, prompts, GREEDY)


@pytest.fixture(scope="module")
def baseline(make_llm: MakeLLM, few: list[list[int]]) -> dict[str, Outputs]:
    with make_llm() as llm:
        return run_both(llm, few)


def assert_same(
    reference: Reference, prompt: list[int], expected: list[int], found: list[int], params: SamplingParams
) -> None:
    """Two outputs are identical up to their end, or up to a near tie (after which they have nothing in common)."""
    if expected == found:
        return
    places = [i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b]
    assert places, f"{len(found)} tokens, expected {len(expected)}"
    place = places[0]
    logits = reference.logits([*prompt, *expected[:place]])[-1]
    scores = logits if params.is_greedy else logits / params.temperature + noise_of(len(prompt) + place, len(logits))
    gap = abs(float(scores[expected[place]] - scores[found[place]]))
    assert gap <= NEAR_TIE, f"output token {place} is {found[place]}, expected {expected[place]}: {gap:.3g} apart"


def noise_of(position: int, vocab_size: int) -> torch.Tensor:
    seed = torch.tensor([SEED - 2**64 if SEED >= 2**63 else SEED])
    return gumbel_noise(seed, torch.tensor([position]), torch.tensor([0]), torch.arange(vocab_size)[None])[0]


def test_greedy_equals_transformers(reference: Reference, prompts: list[list[int]], greedy: Outputs) -> None:
    num_ties = num_tokens = 0
    for prompt, output in zip(prompts, greedy, strict=True):
        result = reference.check_greedy(prompt, output)
        num_ties += result.num_near_ties
        num_tokens += result.num_tokens
    assert num_tokens > 24 * NUM_TOKENS / 2, "most prompts must not end at once"
    assert num_ties <= 3, "near ties are rare; many of them would hide a fault"


def test_greedy_equals_cached_generation_of_transformers(
    reference: Reference, prompts: list[list[int]], greedy: Outputs
) -> None:
    """Token by token with transformers' own KV cache, not teacher-forced."""
    for i in (0, 6, 12, 19, 21):
        expected = reference.greedy(prompts[i], NUM_TOKENS, eos_token_ids=[2])
        assert_same(reference, prompts[i], expected, greedy[i], GREEDY)


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_does_not_depend_on(
    variant: str, make_llm: MakeLLM, few: list[list[int]], baseline: dict[str, Outputs], reference: Reference
) -> None:
    """Greedy and seeded sampling.

    Case: vllm#5898
    Case: vllm#48245
    """
    with make_llm(**VARIANTS[variant]) as llm:
        options = {"priority": [i % 3 for i in range(2 * len(few))]} if variant == "priority" else {}
        found = run_both(llm, few, **options)
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            for prompt, expected, output in zip(few, baseline[name], found[name], strict=True):
                assert_same(reference, prompt, expected, output, params)
        if variant == "a pool that preempts":
            assert llm.stats().num_preemptions > 0
        assert llm.stats().num_running == llm.stats().num_waiting == llm.stats().num_used_blocks == 0


def test_cached_prefixes_change_nothing(
    make_llm: MakeLLM, few: list[list[int]], baseline: dict[str, Outputs], reference: Reference
) -> None:
    """The second pass finds its prompts in the cache.

    Case: vllm#5543
    """
    with make_llm() as llm:
        run(llm, few, GREEDY)
        before = llm.stats().prefix_cache_hits
        found = run(llm, few, GREEDY)
        assert llm.stats().prefix_cache_hits - before >= 192
    for prompt, expected, output in zip(few, baseline["greedy"], found, strict=True):
        assert_same(reference, prompt, expected, output, GREEDY)


def test_the_comparison_has_teeth(reference: Reference, few: list[list[int]], baseline: dict[str, Outputs]) -> None:
    wrong = [*baseline["greedy"][0]]
    wrong[3] = (wrong[3] + 1) % 49152
    with pytest.raises(AssertionError, match="output token 3"):
        assert_same(reference, few[0], baseline["greedy"][0], wrong, GREEDY)
    with pytest.raises(AssertionError, match="output token 3"):
        reference.check_greedy(few[0], wrong)
