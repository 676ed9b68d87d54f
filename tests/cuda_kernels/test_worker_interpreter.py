"""The whole worker with the Triton kernels in the interpreter samples the tokens of the CPU's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from kernels.dispatch import CHOICE_VARIABLE
from tests.cuda_kernels.worker_steps import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    # Random weights of the default size give logits so close together that a rounding could change a token.
    "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(num_key_value_heads=2, **SHAPE | {"num_hidden_layers": 1}),
    # Norms of query and key heads, one layer that sees everything and one with a window, a head size of its own.
    "qwen3": Qwen3Config(
        num_key_value_heads=1, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1, **SHAPE
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    for name, config in CONFIGS.items():
        model = (LlamaForCausalLM if name == "llama" else Qwen3ForCausalLM)(config)
        model.save_pretrained(parent / name)
    return [str(parent / name) for name in CONFIGS]


def run(folders: list[str], kernels: str) -> list[dict[str, Any]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {CHOICE_VARIABLE: kernels, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cuda_kernels.worker_steps", *folders]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_token_ids_are_those_of_the_cpu(folders: list[str]) -> None:
    expected, got = run(folders, "auto"), run(folders, "interpreter")
    for name, mine, others in zip(CONFIGS, got, expected, strict=True):
        assert mine["errors"] == [""] * 5, name
        assert (mine["cache_dims"], others["cache_dims"]) == (4, 5), "the one has CUDA's layout, the other the CPU's"
        assert (mine["num_replays"] >= 3) == (name == "llama") and others["num_replays"] == 0
        assert mine["token_ids"] == others["token_ids"], name
        assert [len(ids) for ids in mine["token_ids"]] == [6, 6, 5, 4, 3]
        assert len({token for ids in mine["token_ids"] for token in ids}) > 8, "the model says something"
        for a, b in zip(mine["logprobs"], others["logprobs"], strict=True):
            assert np.allclose(a, b, atol=1e-4), name
