"""SmolLM2 in a real worker process, driven by hand-made plans over gRPC, against transformers."""

import numpy as np
import pytest
import torch

from pagewire.plan import StepPlan
from pagewire.sampling import SamplingParams
from tests.worker.mini_core import MiniCore, request
from tests.worker.worker_support import Client, worker_process
from worker_svc.fetch import resolve_model

pytestmark = pytest.mark.slow

TEXTS = [
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "The river rises in the hills above the town, gathers a dozen streams on its way, and turns three mills before it "
    "reaches the plain. In spring it floods the meadows",
    "东京是日本的首都。",
    "🙂🙃 emoji:",
]
NUM_TOKENS = 8
NEAR_TIE = 1e-4
"""DESIGN.md, invariant 5: where the two best logits are this close, teacher-forced logits are compared instead."""


@pytest.fixture(scope="module")
def hf():
    """Model and tokenizer as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return model, tokenizer


@pytest.fixture(scope="module")
def client():
    with worker_process("--num-threads", "2") as (_, ready):
        client = Client(ready.address)
        client.handshake()
        info = client.load("smollm2", dtype=1)[-1].model
        assert info.vocab_size == 49152 and info.num_layers == 30 and info.is_native
        yield client
        client.close()


class Epochs:
    """A fresh pool, batch and stream per test on the one worker."""

    def __init__(self, client):
        self.client, self.epoch = client, 0

    def core(self, block_size=16, num_blocks=200):
        self.epoch += 1
        self.client.initialize_cache(
            self.epoch, block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=2048
        )
        stream = self.client.stream(self.epoch)
        stream.opened()
        return MiniCore(stream.execute, num_blocks=num_blocks, block_size=block_size, epoch=self.epoch)


@pytest.fixture(scope="module")
def epochs(client):
    return Epochs(client)


@pytest.fixture(scope="module")
def prompts(hf):
    return [hf[1](text)["input_ids"] for text in TEXTS]


@torch.inference_mode()
def check_greedy(model, prompt, output):
    """Every token is the likeliest by transformers' teacher-forced logits, near ties apart."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(dim=-1).values
    gap = best - logits.gather(1, torch.tensor(output)[:, None]).flatten()
    top = logits.topk(2).values
    is_tie = (top[:, 0] - top[:, 1]) < NEAR_TIE
    assert bool(((gap == 0) | (is_tie & (gap < NEAR_TIE))).all()), f"at {gap.nonzero().flatten().tolist()}"


@pytest.fixture(scope="module")
def greedy(hf, prompts):
    """What transformers generates."""
    model, _ = hf
    outputs = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options)
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize(("budget", "block_size"), [(16, 16), (5, 16), (1, 8), (2048, 32)])
def test_greedy_equals_transformers(epochs, hf, prompts, greedy, budget, block_size):
    which = 1 if budget == 1 else 0
    [output] = epochs.core(block_size).generate([request(prompts[which])], NUM_TOKENS, budget)
    check_greedy(hf[0], prompts[which], output)
    assert output == greedy[which]


def test_batch_equals_alone_and_transformers(epochs, hf, prompts, greedy):
    """Case: vllm#5898"""
    together = epochs.core().generate([request(p) for p in prompts], NUM_TOKENS, budget=40)
    for prompt, output, expected in zip(prompts, together, greedy, strict=True):
        check_greedy(hf[0], prompt, output)
        assert output == expected


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_resumed(epochs, prompts):
    def params(seed):
        return SamplingParams(temperature=0.8, top_p=0.95, seed=seed)

    chosen = prompts[:3]
    alone = [epochs.core().generate([request(p, params(i))], NUM_TOKENS)[0] for i, p in enumerate(chosen)]
    core = epochs.core()
    requests = [request(p, params(i)) for i, p in enumerate(chosen)]
    core.generate(requests, 3, budget=33)
    core.release(requests[1])  # preempted: recomputes prompt and output
    assert core.generate(requests, NUM_TOKENS, budget=21) == alone
    other = epochs.core().generate([request(prompts[0], params(99))], NUM_TOKENS)[0]
    assert other != alone[0]


def test_shared_prefix_blocks(epochs, prompts, greedy):
    """Case: vllm#5543"""
    core = epochs.core(block_size=8)
    first, second = request(prompts[2]), request(prompts[2])
    core.run([(first, len(prompts[2]))])
    num_shared = (len(prompts[2]) - 1) // 8
    second.blocks, second.computed = first.blocks[:num_shared], num_shared * 8
    assert core.generate([first, second], NUM_TOKENS) == [greedy[2], greedy[2]]


def test_slot_released_and_reused_in_one_plan(epochs, prompts, greedy):
    core = epochs.core()
    first = request(prompts[1])
    core.generate([first], 4)
    slot = first.slot
    core.release(first)
    second = request(prompts[3])
    [output] = core.generate([second], NUM_TOKENS)
    assert second.slot == slot and output == greedy[3]


@pytest.mark.parametrize("budget", [7, 2048])
def test_prompt_logprobs_equal_transformers(epochs, hf, prompts, budget):
    """Case: vllm#14239"""
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=3)
    req = request(prompts[2], params)
    epochs.core().generate([req], 3, budget)
    with torch.inference_mode():
        logits = hf[0](torch.tensor([req.tokens])).logits[0].double()
    expected = torch.log_softmax(logits, dim=-1)
    positions = [start + i for start, columns in req.prompt_logprobs for i in range(len(columns))]
    assert positions == list(range(1, req.num_prompt))
    entries = [
        (start + i, columns.rows(i, i + 1)) for start, columns in req.prompt_logprobs for i in range(len(columns))
    ]
    entries += [(req.num_prompt + i, columns) for i, columns in enumerate(req.logprobs)]
    for position, columns in entries:
        row = expected[position - 1]
        assert columns.token_ids[0, 0] == req.tokens[position]
        np.testing.assert_allclose(columns.logprobs[0], row[columns.token_ids[0].tolist()].numpy(), atol=2e-3)
        assert columns.logprobs[0, 1] == pytest.approx(float(row.max()), abs=2e-3)
        least, most = (1 + int((row > row[req.tokens[position]] + d).sum()) for d in (2e-3, -2e-3))
        assert least <= columns.ranks[0] <= most


def test_drafts_do_not_change_the_output(epochs, prompts, greedy):
    core = epochs.core()
    req = request(prompts[0])
    core.generate([req], 1)
    core.run([(req, 4, [*greedy[0][1:3], 7])])
    assert req.output == greedy[0][:4] and req.computed == len(prompts[0]) + 3
    assert core.generate([req], NUM_TOKENS) == [greedy[0]]


def test_default_pool_is_reported(client, epochs):
    epochs.epoch += 1
    pool = client.initialize_cache(epochs.epoch, block_size=16, num_blocks=0)
    assert pool.bytes_per_block == 2 * 30 * 16 * 3 * 64 * 4
    assert 2 <= pool.num_blocks <= (2 << 30) // pool.bytes_per_block


def test_empty_steps_are_cheap(epochs):
    core = epochs.core()
    for _ in range(50):
        result = core.run([])
    assert isinstance(core.plan([]), StepPlan) and result.timings.forward_ns == 0
