"""The native decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 over paged KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import nn

import kernels
from kernels.kv_layout import is_packed
from kernels.matrix import Weight, new_weight, weight_parts
from kernels.packed_weight import PackedWeight, WeightPart
from worker_svc.models import kv_scales
from worker_svc.models.decoder_config import DecoderConfig
from worker_svc.models.interface import ForwardBatch, KvCaches, KvCacheSpec

NewWeight = Callable[..., Weight]
"""Has the signature of kernels.matrix.new_weight."""
Views = Iterator[tuple[str, torch.Tensor | WeightPart]]


class _Place(NamedTuple):
    """Where weights are and of what type."""

    dtype: torch.dtype
    device: torch.device
    new_weight: NewWeight

    def vector(self, size: int) -> nn.Parameter:
        """A norm's weight or a bias."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)

    def matrix(self, part_sizes: list[int], in_features: int, is_gated: bool = False) -> Weight:
        """A weight of one or several projections; one that is not packed is a parameter of its module."""
        made = self.new_weight(part_sizes, in_features, dtype=self.dtype, device=self.device, is_gated=is_gated)
        return made if isinstance(made, PackedWeight) else nn.Parameter(made, requires_grad=False)


class _Linear(nn.Module):
    """A matrix product whose output may be several projections side by side."""

    bias: torch.Tensor | None

    def __init__(
        self, place: _Place, in_features: int, part_sizes: list[int], has_bias: bool, is_gated: bool = False
    ) -> None:
        super().__init__()
        self.part_sizes = part_sizes
        self.weight = place.matrix(part_sizes, in_features, is_gated)
        self.bias = place.vector(sum(part_sizes)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def views(self, *names: str) -> Views:
        """By a checkpoint's names: the projections that lie side by side."""
        for name, part in zip(names, weight_parts(self.weight, self.part_sizes), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, part in zip(names, self.bias.detach().split(self.part_sizes), strict=True):
                yield f"{name}.bias", part


class _Attention(nn.Module):
    key_scale: torch.Tensor | None
    """Of a KV cache of 8 bits, float32 [1] or [num_kv_heads]; None is 1."""
    value_scale: torch.Tensor | None

    def __init__(self, place: _Place, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__()
        self.config, self.sliding_window = config, sliding_window
        self.scale = config.head_size**-0.5
        self.sizes = [n * config.head_size for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = _Linear(place, config.hidden_size, self.sizes, config.has_qkv_bias)
        self.output = _Linear(place, self.sizes[0], [config.hidden_size], config.has_output_bias)
        self.query_norm = place.vector(config.head_size) if config.has_qk_norm else None
        self.key_norm = place.vector(config.head_size) if config.has_qk_norm else None
        self.register_buffer("key_scale", None)
        self.register_buffer("value_scale", None)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        key_scale, value_scale = self.key_scale, self.value_scale
        if kv_cache[0].dtype != torch.float8_e4m3fn:
            key_scale = value_scale = None
        query = kernels.rotate_and_write_kv(
            self.qkv(x),
            batch.positions,
            tables,
            kv_cache[0],
            kv_cache[1],
            batch.slot_mapping,
            self.config.head_size,
            None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm),
            self.config.rms_norm_eps,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        attended = kernels.paged_attention(
            query,
            kv_cache[0],
            kv_cache[1],
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            self.scale,
            sliding_window=self.sliding_window,
            # Every token is a row's, so all of it is written. By itself the operation fills it with zeros first.
            out=None if is_packed(kv_cache[0]) else torch.empty_like(query, memory_format=torch.contiguous_format),
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return self.output(attended.flatten(1))


class _Layer(nn.Module):
    def __init__(self, place: _Place, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.attention_norm = place.vector(hidden_size)
        self.attention = _Attention(place, config, sliding_window)
        self.mlp_norm = place.vector(hidden_size)
        self.gate_up = _Linear(place, hidden_size, [intermediate_size] * 2, config.has_mlp_bias, is_gated=True)
        self.down = _Linear(place, intermediate_size, [hidden_size], config.has_mlp_bias)


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
        new_weight: NewWeight = new_weight,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.dtype, self.device = config, config.vocab_size, dtype, device
        place = _Place(dtype, device, new_weight)
        self.embedding = place.matrix([config.vocab_size], config.hidden_size)
        self.layers = nn.ModuleList(_Layer(place, config, window) for window in config.sliding_windows)
        self.norm = place.vector(config.hidden_size)
        self.lm_head = None if config.is_tied else _Linear(place, config.hidden_size, [config.vocab_size], False)
        self.rope_tables = (rope_tables[0].to(device), rope_tables[1].to(device))

    def kv_cache_specs(self) -> list[KvCacheSpec]:
        """One per layer that keeps KV."""
        return [KvCacheSpec(self.config.num_kv_heads, self.config.head_size)] * self.config.num_layers

    def checkpoint_views(self) -> dict[str, torch.Tensor | WeightPart]:
        """By a checkpoint's tensor names: the part of a weight that the tensor fills."""
        return dict(self._checkpoint_views())

    def take_kv_scale(self, name: str, tensor: torch.Tensor) -> bool:
        """Takes over a checkpoint's scale of a layer's KV; False: the tensor is no such one. ValueError: a bad one."""
        found = kv_scales.parse_name(name)
        if found is None or found[0] >= self.config.num_layers:
            return False
        attention = cast(_Layer, self.layers[found[0]]).attention
        scale = kv_scales.checked(tensor, self.config.num_kv_heads).to(self.device)
        setattr(attention, "key_scale" if found[1] else "value_scale", scale)
        return True

    def weights(self) -> Iterator[torch.Tensor | PackedWeight]:
        """Every weight."""
        yield from self.parameters()
        for module in self.modules():
            yield from (value for value in vars(module).values() if isinstance(value, PackedWeight))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_caches: KvCaches) -> torch.Tensor:
        """Writes the batch's KV and returns hidden states [num_tokens, hidden_size] after the final norm."""
        eps = self.config.rms_norm_eps
        hidden: torch.Tensor = kernels.embedding(batch.input_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer, kv_cache in zip(self._layers(), kv_caches, strict=True):
            hidden, residual = kernels.rms_norm(hidden, layer.attention_norm, eps, residual)
            hidden = layer.attention(hidden, batch, kv_cache, self.rope_tables)
            hidden, residual = kernels.rms_norm(hidden, layer.mlp_norm, eps, residual)
            gated = kernels.gated_linear(hidden, layer.gate_up.weight, layer.gate_up.bias)
            hidden = layer.down(gated)
        return kernels.rms_norm(hidden, self.norm, eps, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] in float32 for hidden states [rows, hidden_size]."""
        weight = self.embedding if self.lm_head is None else self.lm_head.weight
        return kernels.logits(hidden_states, weight)

    def move_weights(self, device: torch.device) -> None:
        """Moves the weights, for sleeping; forward works again once they are back."""
        self.to(device)

    def _layers(self) -> Iterator[_Layer]:
        return (cast(_Layer, layer) for layer in self.layers)

    def _checkpoint_views(self) -> Views:
        yield "model.embed_tokens.weight", weight_parts(self.embedding, [self.vocab_size])[0]
        yield "model.norm.weight", self.norm.detach()
        if self.lm_head is not None:
            yield from self.lm_head.views("lm_head")
        for i, layer in enumerate(self._layers()):
            prefix = f"model.layers.{i}"
            yield f"{prefix}.input_layernorm.weight", layer.attention_norm.detach()
            yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm.detach()
            attention = layer.attention
            yield from attention.qkv.views(*(f"{prefix}.self_attn.{kind}_proj" for kind in "qkv"))
            yield from attention.output.views(f"{prefix}.self_attn.o_proj")
            yield from layer.gate_up.views(*(f"{prefix}.mlp.{kind}_proj" for kind in ("gate", "up")))
            yield from layer.down.views(f"{prefix}.mlp.down_proj")
            if attention.query_norm is not None and attention.key_norm is not None:
                yield f"{prefix}.self_attn.q_norm.weight", attention.query_norm.detach()
                yield f"{prefix}.self_attn.k_norm.weight", attention.key_norm.detach()
