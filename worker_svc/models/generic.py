"""The generic path: transformers' own modelling code over our KV pool, for the decoders we have none for."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from kernels.matrix import column_major
from pagewire.errors import InvalidArgumentError, violation
from worker_svc.models.generic_attention import (
    PAGED,
    PROBE,
    ProbedCall,
    UnsupportedModelError,
    attach_layers,
    attach_probe,
    detach_probe,
)
from worker_svc.models.interface import ForwardBatch, KvCaches, KvCacheSpec

_PROBE_TOKENS = 3
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


class GenericModel:
    """A Model (see interface.py) around a causal language model of transformers.

    Raises InvalidArgumentError naming the architecture where one probe shows that its attention does not go through
    ours exactly once per layer, or is of a kind that paged attention does not have.
    """

    def __init__(self, model: Any, architecture: str) -> None:
        self.module: nn.Module = model.eval().requires_grad_(False)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        calls = _probe(model, architecture)
        self._state, self._layers = attach_layers(calls)
        self._base: Any = model.base_model
        self._head = _head_of(model)
        self._pads_single_rows = self.dtype == torch.float32 and self.device.type == "cpu"
        if self._pads_single_rows:
            _lay_out_by_columns(model)
        model.set_attn_implementation(PAGED)

    def kv_cache_specs(self) -> list[KvCacheSpec]:
        """One per layer that keeps KV."""
        return [KvCacheSpec(layer.num_kv_heads, layer.head_size) for layer in self._layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_caches: KvCaches) -> torch.Tensor:
        """Writes the batch's KV and returns hidden states [num_tokens, hidden_size] after the final norm."""
        num_tokens = len(batch.input_ids)
        if num_tokens == 1 and self._pads_single_rows:
            batch = _with_idle_token(batch)
        self._state.batch, self._state.kv_caches = batch, kv_caches
        try:
            output = self._base(
                input_ids=batch.input_ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0), use_cache=False
            )
        finally:
            self._state.batch, self._state.kv_caches = None, []
        hidden: torch.Tensor = output.last_hidden_state[0, :num_tokens]
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] in float32 for hidden states [rows, hidden_size], by the model's own head."""
        num_rows = len(hidden_states)
        if num_rows == 1 and self._pads_single_rows:
            hidden_states = hidden_states.expand(2, -1)
        logits: torch.Tensor = self._head(inputs_embeds=hidden_states.unsqueeze(0), use_cache=False).logits
        return logits[0, :num_rows].float()

    def move_weights(self, device: torch.device) -> None:
        """Moves the weights, for sleeping; forward works again once they are back."""
        self.module.to(device)

    @torch.inference_mode()
    def eager_hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        """Hidden states [len(token_ids), hidden_size] by transformers' own eager attention; the KV pool is not used."""
        module: Any = self.module
        module.set_attn_implementation("eager")
        try:
            ids = torch.tensor([token_ids], device=self.device)
            hidden: torch.Tensor = self._base(input_ids=ids, use_cache=False).last_hidden_state[0]
        finally:
            module.set_attn_implementation(PAGED)
        return hidden


def _lay_out_by_columns(model: nn.Module) -> None:
    """So that a row's product does not depend on how many rows there are; see kernels/matrix.py."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data
            columns = column_major(*weight.shape, dtype=weight.dtype, device=weight.device)
            module.weight.data = columns.copy_(weight)


def _with_idle_token(batch: ForwardBatch) -> ForwardBatch:
    """The batch and one more token of no row, whose KV is not written: a product with one row adds in another order."""
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids.expand(2),
        positions=batch.positions.expand(2),
        slot_mapping=torch.cat([batch.slot_mapping, batch.slot_mapping.new_full((1,), -1)]),
    )


class _GivenOutput:
    """Hidden states, and None for whatever else a head asks of its decoder (router logits, cross attentions)."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, idx: int) -> torch.Tensor:
        return (self.last_hidden_state,)[idx]


class _Given(nn.Module):
    """Stands where a model's decoder was and returns the hidden states that it is given."""

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor, **_kwargs: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)

    @property
    def decoder(self) -> _Given:
        """Some models call their decoder by this name."""
        return self


def _head_of(model: Any) -> Any:
    """The model without its decoder: its own code from hidden states to logits (scales and caps included)."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}
    return head


def _probe(model: Any, architecture: str) -> list[ProbedCall]:
    """Runs a few tokens and returns what each layer asked for."""
    config = model.config.get_text_config()
    try:
        kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
        if kinds:
            raise UnsupportedModelError(f"it has layers of the kind {', '.join(sorted(kinds))}")
        calls = attach_probe(model)
        try:
            model.set_attn_implementation(PROBE)
            tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
            positions = torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0)
            with torch.inference_mode():
                model.base_model(input_ids=tokens, position_ids=positions, use_cache=False)
        finally:
            detach_probe(model)
        num_modules = len({id(call.module) for call in calls})
        if not len(calls) == num_modules == config.num_hidden_layers:
            raise UnsupportedModelError(
                f"of its {config.num_hidden_layers} layers {num_modules} route {len(calls)} calls through "
                "transformers' attention interface; each layer must route one"
            )
    except (UnsupportedModelError, ValueError, TypeError) as error:
        raise InvalidArgumentError(
            [violation("model", architecture, f"can't be served with paged attention: {error}")],
            reason="UNSUPPORTED_ARCHITECTURE",
        ) from error
    return calls
