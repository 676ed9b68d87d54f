"""Our paged attention as an attention implementation of transformers.

Two pairs are registered. "pagewire" runs the model: attention over the KV pool, and no mask. "pagewire_probe" finds
out, once at load, what each layer of a model will ask for: which modules call, with which heads, and which window their
mask would have had (some models put the window into the mask alone, and the mask is what their eager form obeys).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

import kernels
from kernels.kv_layout import is_packed
from pagewire.errors import InternalError
from worker_svc.models.interface import ForwardBatch, KvCaches

PAGED = "pagewire"
PROBE = "pagewire_probe"
_LAYER = "pagewire_layer"
_PROBE_RECORD = "pagewire_probe_record"
_NO_WINDOW, _OTHER_MASK = 0, -1


class UnsupportedModelError(Exception):
    """The model asks for something that paged attention can't give; the message says what."""


@dataclass(slots=True)
class ForwardState:
    """What the attention of one model reads during a forward pass."""

    batch: ForwardBatch | None = None
    kv_caches: KvCaches = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention module and its place in the KV pool."""

    state: ForwardState
    idx: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class ProbedCall:
    """What an attention module asked for in the probe."""

    module: nn.Module
    num_kv_heads: int
    head_size: int
    sliding_window: int | None


def attach_probe(model: nn.Module) -> list[ProbedCall]:
    """The list that receives a model's calls while its attention implementation is PROBE."""
    calls: list[ProbedCall] = []
    for module in model.modules():
        setattr(module, _PROBE_RECORD, calls)
    return calls


def detach_probe(model: nn.Module) -> None:
    """Undoes attach_probe."""
    for module in model.modules():
        delattr(module, _PROBE_RECORD)


def attach_layers(calls: list[ProbedCall]) -> tuple[ForwardState, list[PagedLayer]]:
    """Gives every module that called its layer; the state is where a forward pass puts its batch."""
    state = ForwardState()
    layers = [
        PagedLayer(state, i, call.num_kv_heads, call.head_size, call.sliding_window) for i, call in enumerate(calls)
    ]
    for call, layer in zip(calls, layers, strict=True):
        setattr(call.module, _LAYER, layer)
    return state, layers


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, num_heads, num_tokens, head_size], key and value likewise; returns [1, num_tokens, heads, size]."""
    layer: PagedLayer = getattr(module, _LAYER)
    batch = layer.state.batch
    if batch is None:
        raise InternalError("a model's attention ran outside of a forward pass")
    key_cache, value_cache = layer.state.kv_caches[layer.idx]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    kernels.write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
    attended = kernels.paged_attention(
        query,
        key_cache,
        value_cache,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=layer.sliding_window,
        softcap=softcap,
        sinks=s_aux,
        # The probe has seen that values are as long as keys. By itself the operation fills it with zeros first.
        out=None if is_packed(key_cache) else torch.empty_like(query, memory_format=torch.contiguous_format),
    )
    return attended.unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Records the call and gives zeros."""
    if position_bias is not None:
        raise UnsupportedModelError("its attention has a position bias")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    if value.shape[-1] != key.shape[-1]:
        raise UnsupportedModelError(f"its values have another size than its keys: {value.shape[-1]}, {key.shape[-1]}")
    window = sliding_window
    if attention_mask is not None:
        if attention_mask.shape != (1, 1, 1, 1) or int(attention_mask) == _OTHER_MASK:
            raise UnsupportedModelError("its attention has a mask of its own")
        window = int(attention_mask) if int(attention_mask) != _NO_WINDOW else None
    calls: list[ProbedCall] = getattr(module, _PROBE_RECORD)
    calls.append(ProbedCall(module, key.shape[1], key.shape[3], window))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _probe_mask(
    *_args: Any, local_size: int | None = None, use_vmap: bool = False, device: Any = None, **_: Any
) -> torch.Tensor:
    """In place of a mask: one number that says which window it would have had."""
    kind = _OTHER_MASK if use_vmap else local_size or _NO_WINDOW
    return torch.full((1, 1, 1, 1), kind, device=device)


AttentionInterface.register(PAGED, _paged_attention)
AttentionMaskInterface.register(PAGED, _no_mask)
AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
