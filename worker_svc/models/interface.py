"""What the runner asks of a model, native or generic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class ForwardBatch:
    """One flattened ragged batch: prefill chunks and decodes mixed, num_tokens in all over num_rows requests.

    Token t of row r is at index query_start_loc[r] + t. All tensors are on the model's device.
    """

    input_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64, place of each token in its sequence."""
    query_start_loc: torch.Tensor
    """[num_rows + 1] int32, first token of each row."""
    seq_lens: torch.Tensor
    """[num_rows] int32, tokens of each row whose KV exists after this step's write."""
    block_tables: torch.Tensor
    """[num_rows, max_num_blocks] int32, KV blocks of each row in order; unused entries are 0 (the null block)."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64, block * block_size + offset where each token's KV is written."""
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """Shape of one layer's KV."""

    num_kv_heads: int
    head_size: int


KvCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer: key and value cache, as kernels.kv_layout says."""


class Model(Protocol):
    """A decoder over paged KV."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    def kv_cache_specs(self) -> list[KvCacheSpec]:
        """One per layer that keeps KV."""
        ...

    def forward(self, batch: ForwardBatch, kv_caches: KvCaches) -> torch.Tensor:
        """Writes the batch's KV and returns hidden states [num_tokens, hidden_size] after the final norm."""
        ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] in float32 for hidden states [rows, hidden_size], softcapped where the model is."""
        ...

    def move_weights(self, device: torch.device) -> None:
        """Moves the weights, for sleeping; forward works again once they are back on `device`."""
        ...
