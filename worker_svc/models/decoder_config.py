"""What the native decoder needs to know of a model, read from its transformers configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker_svc.models.rope import NATIVE_ROPE_TYPES, rope_type


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """The output matrix is the embedding."""
    sliding_windows: tuple[int | None, ...]
    """One per layer; None sees everything."""


NATIVE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def decoder_config(architecture: str, config: Any) -> DecoderConfig | None:
    """The native decoder's configuration, or None where it does not know the model and the generic path must serve."""
    if architecture not in NATIVE_ARCHITECTURES:
        return None
    if config.hidden_act != "silu" or rope_type(config) not in NATIVE_ROPE_TYPES:
        return None
    if float(config.rope_parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        return None
    has_bias = bool(getattr(config, "attention_bias", False))
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        has_qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_bias and architecture != "Qwen2ForCausalLM",
        has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        is_tied=bool(config.tie_word_embeddings),
        sliding_windows=_sliding_windows(architecture, config),
    )


def _sliding_windows(architecture: str, config: Any) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * config.num_hidden_layers
    if architecture == "MistralForCausalLM":
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
