"""Runs a whole worker through steps of every kind and prints what it sampled; the environment chooses the kernels.

    python -m tests.cuda_kernels.worker_steps FOLDER [FOLDER ...]

One line of JSON: per model the token ids of every request, log-probabilities, and which way the steps went.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kernels.dispatch import is_interpreting
from pagewire.sampling import SamplingParams
from tests.worker.calls_again import CallsAgain
from tests.worker.mini_core import MiniCore, Req, request
from worker_svc.runner import ModelRunner
from worker_svc.worker import Worker

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 40, 61
PROMPT = [5, 17, 3, 48, 41, 9, 2, 60, 33, 21]


def requests() -> list[Req]:
    """Greedy, sampled with every truncation, with processors, and with log-probabilities."""
    return [
        request(PROMPT),
        request(PROMPT[3:], SamplingParams(temperature=1.3, seed=2**63 + 5)),
        request(PROMPT[:5], SamplingParams(temperature=0.9, top_k=9, top_p=0.8, min_p=0.02, seed=7)),
        request(
            [3, 3, 8],
            SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={4: 2.0}),
        ),
        request(PROMPT[5:8], SamplingParams(temperature=0.0, logprobs=3)),
    ]


def steps(core: MiniCore, live: list[Req]) -> None:
    """A prefill in chunks beside decodes, then decodes alone, then drafts of which some are right."""
    first, *others = live
    core.run([(first, 4), (others[0], 7)])
    core.run([(others[0], 1), (first, 6), (others[1], 5)])
    core.run([(others[1], 1), (first, 1), (others[2], 3), (others[3], 2), (others[0], 1)])
    core.run([(others[3], 1), *[(r, 1) for r in (first, *others[:3])]])
    core.run([(r, 1) for r in live])
    alone = core.generate([request(first.tokens)], 2)[0]
    core.run([(first, 3, [alone[0], (alone[1] + 1) % VOCAB_SIZE]), *[(r, 1) for r in others]])


def run(folder: str, has_graphs: bool) -> dict[str, Any]:
    """What the requests of one model sampled; has_graphs: decode steps as CUDA runs them, with padding."""
    worker = Worker(num_threads=1)
    worker.load_model(folder, dtype="float32")
    worker.initialize_cache(
        epoch=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=6, max_num_batched_tokens=32
    )
    assert worker._loaded is not None and worker._runner is not None
    recorder = CallsAgain()
    if has_graphs:
        runner = worker._runner
        worker._runner = ModelRunner(worker._loaded.model, runner.pool, runner.batch, recorder=recorder)
    core = MiniCore(worker.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    core.free_slots = list(range(6))
    live = requests()
    steps(core, live)
    key_cache = list.__getitem__(worker._runner.pool.caches, 0)[0]
    return {
        "token_ids": [req.output for req in live],
        "errors": [req.error for req in live],
        "logprobs": [columns.logprobs.tolist() for columns in live[4].logprobs],
        "cache_dims": key_cache.dim(),
        "num_replays": recorder.num_replays,
    }


if __name__ == "__main__":
    print(json.dumps([run(folder, is_interpreting() and not i) for i, folder in enumerate(sys.argv[1:])]))
