"""paged_attention: causal attention of a ragged batch over block tables.

Prefill chunks and decodes are mixed in one call. The torch implementation computes each row from a padded length that
depends on that row alone, so that what else is in the batch does not change a row's result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kernels.compiled import compiled, compiled_for_cuda
from kernels.kv_layout import block_size_of, num_kv_heads_of, read_keys, read_values, value_size_of

QUERY_TILE = 256
"""Prefill queries per product: bounds the score matrix to heads x 256 x keys."""
MIN_PRODUCT_ROWS = 4
SUM_COLUMNS = 16
"""Columns of ones: a single one would be a product with a vector, which adds in another order."""


def reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of each row to all tokens of the row before them and themselves.

    query [num_tokens, num_heads, head_size]; caches of any float type as `kv_layout` says; query_start_loc
    [num_rows + 1] int32; seq_lens [num_rows] int32, keys of each row, the new ones included; block_tables [num_rows,
    max_num_blocks] int32. Query head h reads KV head h // (num_heads // num_kv_heads).
    A key is seen where 0 <= query position - key position < sliding_window (None: no bound). Scores are scaled, then
    capped to softcap * tanh(score / softcap), then alibi_slopes[h] * (key position - query position) is added; sinks
    [num_heads] are one more logit per head that takes probability and gives no value. Products and sums are float32.
    key_scale and value_scale, float32 [1] or [num_kv_heads], multiply what the caches hold (float8_e4m3fn, say).
    A query that sees no key and has no sink gives zeros. Returns out, [num_tokens, num_heads, value head size] in
    query's type; lse, float32 [num_tokens, num_heads], is filled with the natural logarithms of the sums of
    exp(logit), the sink's included, -inf where there is none. What lies outside the rows is left as it is.
    """
    num_heads, head_size = query.shape[1:]
    block_size = block_size_of(key_cache)
    num_kv_heads = num_kv_heads_of(key_cache)
    group_size = num_heads // num_kv_heads
    key_scales, value_scales = (_per_head(x, num_kv_heads) for x in (key_scale, value_scale))
    out = _output(query, value_cache) if out is None else out
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        query_len = starts[row + 1] - starts[row]
        for i in range(query_len):
            position = seq_len - query_len + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = range(first, position + 1)
            slots = torch.tensor([int(block_tables[row, p // block_size]) * block_size + p % block_size for p in seen])
            keys = read_keys(key_cache, slots.long(), head_size).float() * key_scales
            all_values = read_values(value_cache, slots.long(), block_size).float() * value_scales
            for head in range(num_heads):
                logits, values = [], []
                for p, key, value in zip(seen, keys, all_values, strict=True):
                    logit = float(query[starts[row] + i, head].float() @ key[head // group_size]) * scale
                    if softcap is not None:
                        logit = softcap * math.tanh(logit / softcap)
                    if alibi_slopes is not None:
                        logit += float(alibi_slopes[head]) * (p - position)
                    logits.append(logit)
                    values.append(value[head // group_size])
                sink = -math.inf if sinks is None else float(sinks[head])
                highest = max([*logits, sink])
                total = sum(math.exp(x - highest) for x in [*logits, sink]) if highest > -math.inf else 1.0
                result = torch.zeros(value_size_of(value_cache))
                for logit, value in zip(logits, values, strict=True):
                    result += math.exp(logit - highest) / total * value
                out[starts[row] + i, head] = result.to(out.dtype)
                if lse is not None:
                    lse[starts[row] + i, head] = highest + math.log(total)
    return out


def torch_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`. Decodes of similar length share one product; a prefill chunk has its own, in query tiles."""
    out = _output(query, value_cache) if out is None else out
    num_kv_heads = num_kv_heads_of(key_cache)
    scores = _Scores(scale, sliding_window, softcap, sinks, alibi_slopes, num_kv_heads)
    sources = _Sources(
        key_cache, value_cache, query.shape[2], *(_per_head(x, num_kv_heads) for x in (key_scale, value_scale))
    )
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    block_size = block_size_of(key_cache)
    decodes: dict[int, list[int]] = {}
    for row, seq_len in enumerate(lengths):
        query_len = starts[row + 1] - starts[row]
        if query_len == 1:
            decodes.setdefault(_padded_blocks(seq_len, block_size), []).append(row)
            continue
        for first in range(0, query_len, QUERY_TILE):
            last = min(first + QUERY_TILE, query_len)
            end = seq_len - query_len + last
            begin = 0 if sliding_window is None else max(0, end - (last - first) - sliding_window + 1)
            begin = begin // block_size * block_size
            num_keys = max(1, -(-end // block_size)) * block_size - begin
            tokens = slice(starts[row] + first, starts[row] + last)
            positions = torch.arange(end - (last - first), end, device=query.device).unsqueeze(0)
            slots = scores.slots(block_tables[row : row + 1], positions, begin, num_keys, block_size)
            results, logs = scores.attend(query[tokens].unsqueeze(0), *sources.read(slots), positions, begin)
            out[tokens] = results[0]
            if lse is not None:
                lse[tokens] = logs[0]
    for num_blocks, rows in decodes.items():
        picked = torch.tensor(rows, device=query.device)
        tokens_at = query_start_loc.index_select(0, picked).long()
        positions = seq_lens.index_select(0, picked).long().unsqueeze(1) - 1
        num_keys = min(num_blocks, block_tables.shape[1]) * block_size
        slots = scores.slots(block_tables.index_select(0, picked), positions, 0, num_keys, block_size)
        decoded = query.index_select(0, tokens_at).unsqueeze(1)
        results, logs = scores.attend(decoded, *sources.read(slots), positions, 0)
        out[tokens_at] = results[:, 0]
        if lse is not None:
            lse[tokens_at] = logs[:, 0]
    return out


def cpu_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`. A row's output depends on nothing but its query and keys, bit by bit; see kernels/cpu."""
    module = compiled("attention")
    args = query, key_cache, value_cache, query_start_loc, seq_lens, block_tables, scale
    options: dict[str, Any] = {
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "out": out,
    }
    is_plain = key_scale is None and value_scale is None and lse is None and (out is None or out.stride(-1) == 1)
    if is_plain and module is not None and module.can_attend(*args[:-1]):
        return module.paged_attention(*args, **options)
    return torch_paged_attention(*args, **options, key_scale=key_scale, value_scale=value_scale, lse=lse)


def cuda_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`."""
    module = compiled_for_cuda("attention")
    attend = torch_paged_attention if module is None else module.paged_attention
    result: torch.Tensor = attend(
        query,
        key_cache,
        value_cache,
        query_start_loc,
        seq_lens,
        block_tables,
        scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        key_scale=key_scale,
        value_scale=value_scale,
        out=_output(query, value_cache) if out is None else out,
        lse=lse,
    )
    return result


def _output(query: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*query.shape[:2], value_size_of(value_cache), dtype=query.dtype, device=query.device)


def _padded_blocks(seq_len: int, block_size: int) -> int:
    """Blocks to read for a decode: rounded up in eight steps per octave, so that few shapes occur."""
    blocks = max(1, -(-seq_len // block_size))
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step


def _per_head(scale: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor | float:
    """A cache's scale, to multiply [..., num_kv_heads, size]."""
    return 1.0 if scale is None else scale.float().expand(num_kv_heads).unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where keys and values come from; scales as `_per_head` gives them."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    head_size: int
    key_scale: torch.Tensor | float
    value_scale: torch.Tensor | float

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, num_kv_heads, keys, size] in float32 of slots [rows, keys]."""
        keys = read_keys(self.key_cache, slots, self.head_size).float() * self.key_scale
        values = read_values(self.value_cache, slots, block_size_of(self.key_cache)).float() * self.value_scale
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product that adds in one order whatever the number of rows; very few rows would take another path."""
    num_rows = left.shape[1]
    if num_rows >= MIN_PRODUCT_ROWS:
        return torch.bmm(left, right)
    return torch.bmm(F.pad(left, (0, 0, 0, MIN_PRODUCT_ROWS - num_rows)), right)[:, :num_rows].contiguous()


def _row_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, kept as 1, as a product: zeros at the end of a row don't change its order."""
    num_keys = weights.shape[-1]
    rows = weights.view(-1, num_keys)
    if rows.shape[0] < MIN_PRODUCT_ROWS:
        rows = F.pad(rows, (0, 0, 0, MIN_PRODUCT_ROWS - rows.shape[0]))
    sums = torch.mm(rows, weights.new_ones(num_keys, SUM_COLUMNS))[: weights.numel() // num_keys, 0]
    return sums.reshape(*weights.shape[:-1], 1)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How scores are made and turned into outputs; the options of `reference`."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    num_kv_heads: int

    def slots(
        self, block_tables: torch.Tensor, query_positions: torch.Tensor, first_key: int, num_keys: int, block_size: int
    ) -> torch.Tensor:
        """Where the keys lie: [rows, num_keys] int64.

        A key that no query of its row sees is replaced by one that some query sees: an unused slot may hold NaN, and
        0 * NaN is NaN.
        """
        keys = torch.arange(first_key, first_key + num_keys, device=block_tables.device)
        last = query_positions[:, -1:].clamp(min=0)
        keys = torch.minimum(keys, last)
        if self.sliding_window is not None:
            keys = torch.maximum(keys, torch.minimum(query_positions[:, :1] - self.sliding_window + 1, last))
        return block_tables.gather(1, keys // block_size).long() * block_size + keys % block_size

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_positions: torch.Tensor,
        first_key_position: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [rows, queries, num_heads, value size], in query's type, and their log-sum-exps in float32.

        query [rows, queries, num_heads, head_size], keys and values [rows, num_kv_heads, keys, size] float32,
        query_positions [rows, queries].
        """
        rows, num_queries, num_heads, head_size = query.shape
        groups, num_keys = num_heads // self.num_kv_heads, keys.shape[2]
        # [rows, num_kv_heads, queries * groups, head_size]: the heads of a group share their keys in one product.
        packed = query.float().reshape(rows, num_queries, self.num_kv_heads, groups, head_size).transpose(1, 2)
        packed = packed.reshape(rows * self.num_kv_heads, num_queries * groups, head_size) * self.scale
        scores = _product(packed, keys.flatten(0, 1).transpose(1, 2))
        scores = scores.view(rows, self.num_kv_heads, num_queries, groups, num_keys)
        if self.softcap is not None:
            scores = torch.tanh(scores.div_(self.softcap)).mul_(self.softcap)
        key_positions = torch.arange(first_key_position, first_key_position + num_keys, device=query.device)
        distance = query_positions.unsqueeze(-1) - key_positions
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.float().view(1, self.num_kv_heads, 1, groups, 1)
            scores -= slopes * distance[:, None, :, None]
        is_hidden = distance < 0
        if self.sliding_window is not None:
            is_hidden |= distance >= self.sliding_window
        scores.masked_fill_(is_hidden[:, None, :, None], -torch.inf)
        weights, seen, total, logs = self._weights(scores, groups)
        weights = weights.view(rows * self.num_kv_heads, num_queries * groups, num_keys)
        result = _product(weights, values.flatten(0, 1)).view(rows, self.num_kv_heads, num_queries, groups, -1)
        # Where nothing is seen, whatever was gathered must not show.
        result = result.div_(total).masked_fill_(seen == 0, 0).transpose(1, 2)
        logs = logs.transpose(1, 2).reshape(rows, num_queries, num_heads)
        return result.reshape(rows, num_queries, num_heads, -1).to(query.dtype), logs

    def _weights(
        self, scores: torch.Tensor, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """exp(scores - highest), its sum (0 where nothing is seen), that sum with the sinks, and its logarithm."""
        highest = scores.amax(dim=-1, keepdim=True)
        sinks = None if self.sinks is None else self.sinks.float().view(1, self.num_kv_heads, 1, groups, 1)
        if sinks is not None:
            highest = torch.maximum(highest, sinks)
        highest.clamp_(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(highest).exp_()
        seen = _row_sums(weights)
        total = seen if sinks is None else seen + torch.exp(sinks - highest)
        return weights, seen, total, highest + total.log()
