"""rotary_embedding: turns query and key by their position (Su et al., 2021), in the half-split (NeoX) layout."""

from __future__ import annotations

import torch


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first 2 * half elements of each head; the others (partial rotary) stay.

    query [num_tokens, num_heads, head_size], key [num_tokens, num_kv_heads, head_size], positions [num_tokens] int64,
    tables [max_position, half] float32. Element i pairs with element i + half. Returns new tensors of the input types;
    the products are float32.
    """
    half = cos_table.shape[1]
    rotated = []
    for x in (query, key):
        out = x.clone()
        for t, position in enumerate(positions.tolist()):
            for i in range(half):
                a, b = x[t, :, i].float(), x[t, :, i + half].float()
                cos, sin = cos_table[position, i], sin_table[position, i]
                out[t, :, i] = (a * cos - b * sin).to(x.dtype)
                out[t, :, i + half] = (b * cos + a * sin).to(x.dtype)
        rotated.append(out)
    return rotated[0], rotated[1]


def torch_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    cos = cos_table.index_select(0, positions).unsqueeze(1)
    sin = sin_table.index_select(0, positions).unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)]
    if 2 * half == x.shape[-1]:
        return torch.cat(parts, dim=-1).to(x.dtype)
    return torch.cat([part.to(x.dtype) for part in parts] + [x[..., 2 * half :]], dim=-1)
