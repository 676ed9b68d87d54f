"""Three processes over gRPC give what one process gives: transformers' greedy output, for real prompts at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prompts import PROMPTS
from reference import Reference

from worker_svc.fetch import resolve_model


def test_greedy_output_over_grpc_equals_transformers(client):
    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    reference = Reference(path)
    prompts = [reference.tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:-1:2]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: client.complete(ids, temperature=0, max_tokens=16), prompts))
    results = [
        reference.check_greedy(prompt, answer.outputs[0].token_ids)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert len(results) == 12
    assert sum(result.num_tokens for result in results) > 96
    assert sum(result.num_near_ties for result in results) <= 2
