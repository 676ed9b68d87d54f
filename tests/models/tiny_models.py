"""Small models with random weights, one per architecture and option, on which every path must agree with eager.

Weights are large, so that attention, caps and norms matter; windows are shorter than the sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB_SIZE = 199
MAX_LEN = 96


@dataclass(frozen=True)
class TinyModel:
    """Configuration of a tiny model, and which parts of attention it has."""

    name: str
    config_class: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_native: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    weight_std: float = 0.25

    def config(self) -> Any:
        values = {**BASE, **self.options}
        return getattr(transformers, self.config_class)(**values)


BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # The standard deviation that transformers draws with is replaced in `build`.
}
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}

NATIVE = [
    TinyModel("llama", "LlamaConfig", is_native=True),
    TinyModel(
        "llama-tied-biased",
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 20},
        is_native=True,
    ),
    TinyModel(
        "llama-linear", "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, **THETA}}, True
    ),
    TinyModel(
        "llama-dynamic", "LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, **THETA}}, True
    ),
    TinyModel("llama-llama3", "LlamaConfig", {"rope_parameters": {**LLAMA3, **THETA}}, True),
    TinyModel("llama-yarn", "LlamaConfig", {"rope_parameters": {**YARN, **THETA}}, True),
    TinyModel("mistral", "MistralConfig", {"sliding_window": 7, "head_dim": 24}, True, has_window=True),
    TinyModel("mistral-full", "MistralConfig", {"sliding_window": None}, True),
    TinyModel("qwen2", "Qwen2Config", {"tie_word_embeddings": True}, True),
    TinyModel("qwen2-windowed", "Qwen2Config", WINDOWED, True, has_window=True),
    TinyModel("qwen3", "Qwen3Config", {"head_dim": 24, "attention_bias": True}, True),
    TinyModel("qwen3-windowed", "Qwen3Config", {"head_dim": 16, **WINDOWED}, True, has_window=True),
]

MOE = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
GENERIC = [
    TinyModel("gpt2", "GPT2Config", {"tie_word_embeddings": True}),
    TinyModel("gpt2-inverse-layer-scale", "GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
    TinyModel("gpt-neox", "GPTNeoXConfig", {"rope_parameters": {"partial_rotary_factor": 0.25, **THETA}}),
    TinyModel("opt", "OPTConfig", {"ffn_dim": 112, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
    TinyModel("opt-projected", "OPTConfig", {"ffn_dim": 112, "word_embed_proj_dim": 48, "do_layer_norm_before": False}),
    TinyModel(
        "gemma2",
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 9.0,
            **TWO_KINDS,
        },
        has_window=True,
        has_softcap=True,
    ),
    TinyModel("gemma3", "Gemma3TextConfig", {"head_dim": 24, **TWO_KINDS}, has_window=True),
    TinyModel("phi3", "Phi3Config", {"sliding_window": 7}, has_window=True),
    TinyModel(
        "phi3-longrope",
        "Phi3Config",
        {
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 48,
                **THETA,
            },
        },
    ),
    TinyModel("olmo2", "Olmo2Config"),
    TinyModel("starcoder2", "Starcoder2Config", {"sliding_window": 7}, has_window=True),
    TinyModel(
        "granite",
        "GraniteConfig",
        {"attention_multiplier": 0.3, "logits_scaling": 3.0, "residual_multiplier": 0.6, "embedding_multiplier": 2.0},
    ),
    TinyModel("cohere", "CohereConfig", {"use_qk_norm": True, "tie_word_embeddings": True}),
    TinyModel(
        "mixtral",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
        has_window=True,
    ),
    TinyModel("qwen2-moe", "Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 40}),
    TinyModel(
        "qwen2-moe-windowed",
        "Qwen2MoeConfig",
        {**MOE, "shared_expert_intermediate_size": 40, **WINDOWED},
        has_window=True,
    ),
    TinyModel(
        "gpt-oss",
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", **THETA},
            **TWO_KINDS,
        },
        has_window=True,
        has_sinks=True,
    ),
]
ALL = NATIVE + GENERIC
BY_NAME = {tiny.name: tiny for tiny in ALL}


@functools.cache
def build(name: str) -> Any:
    """The transformers model in eager attention and float32, the same in every call."""
    tiny = BY_NAME[name]
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(tiny.config(), dtype=torch.float32, attn_implementation="eager")
    randomize(model, tiny.weight_std)
    return model.eval()


def randomize(model: Any, weight_std: float) -> None:
    """Large random weights everywhere; also in norms, biases and sinks, which start as constants."""
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else noise * weight_std)


def save(name: str, directory: Any, **options: Any) -> Any:
    """Writes a tiny model as a Hugging Face directory."""
    build(name).save_pretrained(directory, **options)
    return directory


@torch.no_grad()
def eager_logits(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits at every position, one dense pass per sequence."""
    return [model(torch.tensor([tokens]), use_cache=False).logits[0].float() for tokens in sequences]
