"""The native decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 over paged KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from kernels.matrix import column_major
from worker_svc.models.decoder_config import DecoderConfig
from worker_svc.models.interface import ForwardBatch, KvCaches, KvCacheSpec


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class _Linear(nn.Module):
    """A matrix product whose output may be several projections side by side."""

    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = _weight(out_features, in_features)
        self.bias = _weight(out_features) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__()
        self.config, self.sliding_window = config, sliding_window
        self.scale = config.head_size**-0.5
        self.sizes = [n * config.head_size for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = _Linear(config.hidden_size, sum(self.sizes), config.has_qkv_bias)
        self.output = _Linear(self.sizes[0], config.hidden_size, config.has_output_bias)
        self.query_norm = _weight(config.head_size) if config.has_qk_norm else None
        self.key_norm = _weight(config.head_size) if config.has_qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        parts = self.qkv(x).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.config.head_size)) for part in parts)
        if self.query_norm is not None and self.key_norm is not None:
            query, _ = kernels.rms_norm(query, self.query_norm, self.config.rms_norm_eps)
            key, _ = kernels.rms_norm(key, self.key_norm, self.config.rms_norm_eps)
        query, key = kernels.rotary_embedding(query, key, batch.positions, tables[0], tables[1])
        kernels.write_kv(key, value, kv_cache[0], kv_cache[1], batch.slot_mapping)
        attended = kernels.paged_attention(
            query,
            kv_cache[0],
            kv_cache[1],
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            self.scale,
            sliding_window=self.sliding_window,
        )
        return self.output(attended.flatten(1))


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__()
        self.attention_norm = _weight(config.hidden_size)
        self.attention = _Attention(config, sliding_window)
        self.mlp_norm = _weight(config.hidden_size)
        self.gate_up = _Linear(config.hidden_size, 2 * config.intermediate_size, config.has_mlp_bias)
        self.down = _Linear(config.intermediate_size, config.hidden_size, config.has_mlp_bias)


class Decoder(nn.Module):
    """A Model (see interface.py). Weights are empty until `checkpoint_views` are filled.

    rope_tables are cosine and sine [max_model_len, head_size / 2] float32.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rope_tables: tuple[torch.Tensor, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.dtype, self.device = config, config.vocab_size, dtype, device
        with torch.device("meta"):
            self.embedding = _weight(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(_Layer(config, window) for window in config.sliding_windows)
            self.norm = _weight(config.hidden_size)
            self.lm_head = None if config.is_tied else _Linear(config.hidden_size, config.vocab_size, False)
        self.to(dtype).to_empty(device=device)
        if dtype == torch.float32 and device.type == "cpu":
            self._lay_out_by_columns()
        self.rope_tables = (rope_tables[0].to(device), rope_tables[1].to(device))

    def kv_cache_specs(self) -> list[KvCacheSpec]:
        """One per layer that keeps KV."""
        return [KvCacheSpec(self.config.num_kv_heads, self.config.head_size)] * self.config.num_layers

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """By a checkpoint's tensor names: the part of a weight that the tensor fills."""
        return {name: view.detach() for name, view in self._checkpoint_views()}

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_caches: KvCaches) -> torch.Tensor:
        """Writes the batch's KV and returns hidden states [num_tokens, hidden_size] after the final norm."""
        eps = self.config.rms_norm_eps
        hidden: torch.Tensor = F.embedding(batch.input_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer, kv_cache in zip(self._layers(), kv_caches, strict=True):
            hidden, residual = kernels.rms_norm(hidden, layer.attention_norm, eps, residual)
            hidden = layer.attention(hidden, batch, kv_cache, self.rope_tables)
            hidden, residual = kernels.rms_norm(hidden, layer.mlp_norm, eps, residual)
            hidden = layer.down(kernels.silu_and_mul(layer.gate_up(hidden)))
        return kernels.rms_norm(hidden, self.norm, eps, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] in float32 for hidden states [rows, hidden_size]."""
        weight = self.embedding if self.lm_head is None else self.lm_head.weight
        return kernels.linear(hidden_states, weight).float()

    def move_weights(self, device: torch.device) -> None:
        """Moves the weights, for sleeping; forward works again once they are back."""
        self.to(device)

    def _lay_out_by_columns(self) -> None:
        """So that a row's product does not depend on how many rows there are; see kernels/matrix.py."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.data = column_major(*parameter.shape, dtype=self.dtype, device=self.device)

    def _layers(self) -> Iterator[_Layer]:
        return (cast(_Layer, layer) for layer in self.layers)

    def _checkpoint_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", self.embedding
        yield "model.norm.weight", self.norm
        if self.lm_head is not None:
            yield "lm_head.weight", self.lm_head.weight
        for i, layer in enumerate(self._layers()):
            prefix = f"model.layers.{i}"
            yield f"{prefix}.input_layernorm.weight", layer.attention_norm
            yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm
            attention, intermediate = layer.attention, self.config.intermediate_size
            yield from _split(attention.qkv, f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), attention.sizes)
            yield from _split(attention.output, f"{prefix}.self_attn", ("o_proj",), [self.config.hidden_size])
            yield from _split(layer.gate_up, f"{prefix}.mlp", ("gate_proj", "up_proj"), [intermediate] * 2)
            yield from _split(layer.down, f"{prefix}.mlp", ("down_proj",), [self.config.hidden_size])
            if attention.query_norm is not None and attention.key_norm is not None:
                yield f"{prefix}.self_attn.q_norm.weight", attention.query_norm
                yield f"{prefix}.self_attn.k_norm.weight", attention.key_norm


def _split(
    linear: _Linear, prefix: str, names: tuple[str, ...], sizes: list[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The projections that lie side by side in one packed weight."""
    for kind, packed in (("weight", linear.weight), ("bias", linear.bias)):
        if packed is not None:
            for name, part in zip(names, packed.split(sizes), strict=True):
                yield f"{prefix}.{name}.{kind}", part
