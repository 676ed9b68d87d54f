"""Choosing tokens: greedy argmax, and temperature, top-k, top-p and min-p followed by Gumbel-max.

All three truncations are thresholds on the scaled logit: a token is kept if its logit reaches the threshold, so equal
logits are kept or dropped together and the outcome does not depend on how a sort orders them. Every row is worked on
by operations that reduce over that row alone, so its tokens do not depend on the rows beside it.
"""

from __future__ import annotations

import functools
import logging
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

from kernels.compiled import compiled_for_cuda
from kernels.cpu import jit
from kernels.philox import MAX_GUMBEL, gumbel_noise, reference_gumbel_noise
from kernels.weights import reference_weight, weights

logger = logging.getLogger(__name__)

_FIRST_SORTED = 256
"""Top-p sorts this many of the likeliest tokens first, and eight times more while that does not reach the mass."""
_FEW_CANDIDATES = 1024
"""Rows that keep at most so many tokens share one padded batch of noise; the others are drawn one by one."""


@dataclass(slots=True)
class Draws:
    """How each row is sampled; all tensors are [rows] on the logits' device."""

    temperature: torch.Tensor
    """float32, above 0."""
    top_k: torch.Tensor
    """int64; 0 or less keeps all."""
    top_p: torch.Tensor
    """float64 in (0, 1]: a float32 would move the boundary."""
    min_p: torch.Tensor
    """float64 in [0, 1]."""
    seeds: torch.Tensor
    """int64 holding the 64 unsigned bits."""
    positions: torch.Tensor
    """int64, tokens before the sampled one."""
    child_indices: torch.Tensor
    """int64."""


def reference_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row, int64 [rows], of equal ones the lowest id, and its logit, float32 [rows].

    logits: float32 [rows, vocab_size]. A row with a NaN gives the first one's place, and NaN.
    """
    token_ids = []
    for row in logits.tolist():
        bad = [i for i, x in enumerate(row) if math.isnan(x)]
        token_ids.append(bad[0] if bad else max(range(len(row)), key=lambda i: (row[i], -i)))
    found = torch.tensor(token_ids, dtype=torch.int64)
    return found, logits.gather(1, found[:, None]).flatten()


def torch_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference_argmax`."""
    # torch documents that argmax returns the first of equal maxima and takes a NaN for the maximum.
    token_ids = logits.argmax(dim=-1)
    return token_ids, logits.gather(1, token_ids[:, None]).flatten()


def cpu_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference_argmax`."""
    compiled = compiled_kernels()
    return torch_argmax(logits) if compiled is None or not is_plain(logits) else compiled.argmax(logits)


def cuda_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference_argmax`."""
    module = compiled_for_cuda("sampling") if is_plain(logits) else None
    return torch_argmax(logits) if module is None else module.argmax(logits)


def reference(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token per row, int64 [rows], by Gumbel-max over what the truncations keep.

    logits: float32 [rows, vocab_size] with at least one finite logit per row and no NaN; -inf is never sampled.
    Order: temperature, top-k, top-p over the mass that top-k left, min-p.
    """
    tokens = []
    for i, row in enumerate(scale(logits, draws.temperature).tolist()):
        tokens.append(
            reference_sample(
                row,
                temperature=1.0,
                top_k=int(draws.top_k[i]),
                top_p=float(draws.top_p[i]),
                min_p=float(draws.min_p[i]),
                seed=int(draws.seeds[i]) % (1 << 64),
                position=int(draws.positions[i]),
                child_index=int(draws.child_indices[i]),
            )
        )
    return torch.tensor(tokens, dtype=torch.int64)


def torch_sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See `reference`."""
    scaled = scale(logits, draws.temperature)
    truncate(scaled, draws)
    return _gumbel_argmax(scaled, draws)


def cpu_sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See `reference`."""
    compiled = compiled_kernels()
    return torch_sample(logits, draws) if compiled is None or not is_plain(logits) else compiled.sample(logits, draws)


def cuda_sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See `reference`."""
    module = compiled_for_cuda("sampling") if is_plain(logits) else None
    return torch_sample(logits, draws) if module is None else module.sample(logits, draws)


def is_plain(logits: torch.Tensor) -> bool:
    """Whether the compiled kernels take these logits."""
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.numel() > 0


@functools.cache
def compiled_kernels() -> Any:
    """kernels.cpu.sampling, or None where nothing can be compiled: plain torch samples the same, slower."""
    if reason := jit.unavailable():
        logger.warning("sampling runs on plain torch: %s", reason)
        return None
    from kernels.cpu import sampling

    return sampling


def scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits over temperature, shifted so that each row's largest is 0: no temperature overflows then."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]


def truncate(scaled: torch.Tensor, draws: Draws) -> None:
    """Sets the tokens that top-k, top-p and min-p drop to -inf, in place. Rows without a truncation are not touched."""
    vocab_size = scaled.shape[1]
    for wanted, threshold_of in (
        ((draws.top_k > 0) & (draws.top_k < vocab_size), lambda x, i: top_k_threshold(x, draws.top_k[i])),
        (draws.top_p < 1.0, lambda x, i: top_p_threshold(x, draws.top_p[i])),
        (draws.min_p > 0.0, lambda x, i: draws.min_p[i].log().to(torch.float32)),
    ):
        rows = wanted.nonzero().flatten()
        if len(rows):
            some = scaled[rows]
            scaled[rows] = some.masked_fill_(some < threshold_of(some, rows)[:, None], -math.inf)


def top_k_threshold(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row, [rows]; top_k int64 [rows] in [1, vocab_size]."""
    largest = torch.topk(scaled, int(top_k.max()), dim=-1).values
    return largest.gather(1, top_k[:, None] - 1).flatten()


def top_p_threshold(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The value of the last token of the smallest set of likeliest tokens whose weight reaches top_p of all, [rows].

    scaled: [rows, vocab_size] with maximum 0 per row. Sorts only as many tokens as the mass needs.
    """
    vocab_size = scaled.shape[1]
    target = top_p * weights(scaled).sum(dim=-1)
    threshold = torch.full_like(scaled[:, 0], -math.inf)
    rows = torch.arange(len(scaled), device=scaled.device)
    num_sorted = _FIRST_SORTED
    while len(rows):
        num_sorted = min(num_sorted, vocab_size)
        largest = torch.topk(scaled[rows], num_sorted, dim=-1).values
        reached = weights(largest).cumsum(dim=-1) >= target[rows, None]
        is_done = reached[:, -1]
        last = reached.to(torch.int8).argmax(dim=-1)
        threshold[rows[is_done]] = largest.gather(1, last[:, None]).flatten()[is_done]
        rows = rows[~is_done]
        num_sorted *= 8
    return threshold


def _gumbel_argmax(scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Token with the largest logit plus noise per row; of equal ones the lowest id."""
    likeliest = scaled.argmax(dim=-1)
    # What the likeliest token (its logit is 0) gets bounds the winner from below: no noise lifts a token whose logit is
    # more than the largest possible noise under that.
    least = gumbel_noise(draws.seeds, draws.positions, draws.child_indices, likeliest[:, None])
    kept = (scaled > -math.inf) & (scaled >= least - MAX_GUMBEL)
    tokens = torch.empty_like(likeliest)
    counts = kept.sum(dim=-1)
    few = (counts <= _FEW_CANDIDATES).nonzero().flatten()
    if len(few):
        tokens[few] = _draw_padded(scaled[few], kept[few], counts[few], draws, few)
    for row in (counts > _FEW_CANDIDATES).nonzero().flatten().tolist():
        index = torch.tensor([row], device=scaled.device)
        tokens[row] = _draw_padded(scaled[index], kept[index], counts[index], draws, index)[0]
    return tokens


def _draw_padded(
    scaled: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor, draws: Draws, rows: torch.Tensor
) -> torch.Tensor:
    """Draws from the kept tokens of some rows, gathered into [rows, most kept] in ascending order of token id."""
    row, token = kept.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    token_ids = torch.zeros((len(scaled), int(counts.max())), dtype=torch.int64, device=row.device)
    token_ids[row, place] = token
    logits = torch.full(token_ids.shape, -math.inf, dtype=scaled.dtype, device=row.device)
    logits[row, place] = scaled[row, token]
    logits += gumbel_noise(draws.seeds[rows], draws.positions[rows], draws.child_indices[rows], token_ids)
    return token_ids.gather(1, logits.argmax(dim=-1, keepdim=True)).flatten()


def reference_kept_tokens(
    logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[tuple[float, int]]:
    """What `truncate` keeps of one row as (scaled logit, token id), likeliest first; plain Python, for reading."""
    largest = max(logits)
    order = [((x - largest) / temperature, i) for i, x in enumerate(logits) if x > -math.inf]
    order.sort(key=lambda item: (-item[0], item[1]))
    if 0 < top_k < len(order):
        order = [item for item in order if item[0] >= order[top_k - 1][0]]
    if top_p < 1.0:
        target = top_p * sum(reference_weight(x) for x, _ in order)
        mass = 0.0
        for x, _ in order:
            mass += reference_weight(x)
            if mass >= target:
                order = [item for item in order if item[0] >= x]
                break
    return [item for item in order if min_p == 0.0 or item[0] >= _float32(math.log(min_p))]


def _float32(x: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def reference_sample(
    logits: list[float],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int,
    position: int,
    child_index: int = 0,
) -> int:
    """The token that `sample` takes in one row; plain Python, for reading."""
    if temperature == 0.0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    kept = reference_kept_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    noise = {i: _float32(reference_gumbel_noise(seed, position, child_index, i)) for _, i in kept}
    return -max((_float32(x + noise[i]), -i) for x, i in kept)[1]
