"""A two-layer decoder over paged KV, small enough to run thousands of steps."""

from __future__ import annotations

import math

import torch

import kernels
from worker_svc.models.interface import ForwardBatch, KvCaches, KvCacheSpec

VOCAB_SIZE = 97
MAX_MODEL_LEN = 64
POISON = 96
"""A token whose hidden state is not a number."""


class TinyModel:
    """Random weights from a fixed seed; its logits depend on every token before, and on their order."""

    vocab_size = VOCAB_SIZE

    def __init__(self, num_layers: int = 2, hidden_size: int = 24, num_heads: int = 3) -> None:
        generator = torch.Generator().manual_seed(11)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.fail_with: Exception | None = None

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

        self.embedding = weight(VOCAB_SIZE, hidden_size) * 4
        self.places = weight(MAX_MODEL_LEN, hidden_size) * 4
        self.head = weight(VOCAB_SIZE, hidden_size)
        self.layers = [[weight(hidden_size, hidden_size) * 2 for _ in range(4)] for _ in range(num_layers)]

    def kv_cache_specs(self) -> list[KvCacheSpec]:
        return [KvCacheSpec(self.num_heads, self.head_size) for _ in self.layers]

    def forward(self, batch: ForwardBatch, kv_caches: KvCaches) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids] + self.places[batch.positions]
        for (wq, wk, wv, wo), (key_cache, value_cache) in zip(self.layers, kv_caches, strict=True):
            q, k, v = ((hidden @ w.T).view(-1, self.num_heads, self.head_size) for w in (wq, wk, wv))
            kernels.write_kv(k, v, key_cache, value_cache, batch.slot_mapping)
            mixed = kernels.paged_attention(
                q, key_cache, value_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables,
                1 / math.sqrt(self.head_size),
            )  # fmt: skip
            hidden = hidden + torch.tanh(mixed.reshape(len(hidden), -1) @ wo.T) * 2
        if self.fail_with is not None:
            raise self.fail_with
        return torch.where((batch.input_ids == POISON)[:, None], math.nan, hidden)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = hidden_states @ self.head.T
        logits[:, POISON] -= 100.0  # is never sampled
        return logits


def reference_logits(model: TinyModel, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position of one sequence, by dense attention; no cache, no kernels."""
    hidden = model.embedding[token_ids] + model.places[: len(token_ids)]
    causal = torch.full((len(token_ids),) * 2, -math.inf).triu(1)
    for wq, wk, wv, wo in model.layers:
        q, k, v = ((hidden @ w.T).view(-1, model.num_heads, model.head_size).transpose(0, 1) for w in (wq, wk, wv))
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(model.head_size) + causal, dim=-1)
        mixed = (weights @ v).transpose(0, 1).reshape(len(token_ids), -1)
        hidden = hidden + torch.tanh(mixed @ wo.T) * 2
    return model.compute_logits(hidden)
