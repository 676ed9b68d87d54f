"""What quantization costs on a real model: perplexity of a text of our own against bfloat16."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from frontend_svc import LLM, SamplingParams

TEXT = (Path(__file__).parents[2] / "bench" / "workloads" / "perplexity.txt").read_text()
PIECES = [TEXT[start : start + 1800] for start in range(0, len(TEXT), 1800)]
"""All of it: on one piece the rounding of activations alone moves the ratio by 2 %."""


def perplexity(quantization: str) -> float:
    with LLM("smollm2", dtype="bfloat16", quantization=quantization, kv_cache_memory_bytes=1 << 27) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(PIECES, params, use_tqdm=False)
    positions = [position for output in outputs for position in output.prompt_logprobs or () if position]
    values = [next(iter(position.values())).logprob for position in positions]
    assert len(values) > 1500
    return math.exp(-sum(values) / len(values))


@pytest.mark.slow
def test_quantized_weights_cost_little_perplexity() -> None:
    """gguf runs the file's own 4-bit blocks, so that only the rounding of activations is lost; int8 rounds again."""
    full = perplexity("")
    assert perplexity("gguf") / full == pytest.approx(1, abs=0.01)
    assert perplexity("int8") / full == pytest.approx(1, abs=0.04)
