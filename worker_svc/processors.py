"""Logits processors of the rows that have any, in a fixed order.

Order: grammar mask, logit_bias, allowed_token_ids, bad words, min_tokens, then penalties (repetition over prompt and
output, then frequency and presence over the output alone, as vLLM does). Temperature and the truncations follow in
kernels/sampling.py. A forbidden token has the logit -inf, which none of the later ones lifts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

import kernels
from kernels import penalties
from worker_svc.slot_request import SlotRequest

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class RowContext:
    """One row of logits: its request, and the tokens before the sampled one (drafts before it count as output)."""

    request: SlotRequest
    token_ids: Ints
    grammar_mask: Ints | None = None
    """Bit mask of the allowed tokens, ceil(vocab_size / 32) words."""

    @property
    def output_token_ids(self) -> Ints:
        return self.token_ids[self.request.num_prompt_tokens :]


def apply_processors(logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
    """Applies every processor to logits [rows, vocab_size] in place."""
    _apply_grammar(logits, rows)
    _apply_bias(logits, rows)
    for i, row in enumerate(rows):
        if allowed := row.request.params.allowed_token_ids:
            penalties.keep_only_tokens(logits, i, torch.tensor(allowed, dtype=torch.int64, device=logits.device))
    _mask(logits, ((i, token) for i, row in enumerate(rows) for token in _ends_of_bad_words(row)))
    _mask(logits, ((i, token) for i, row in enumerate(rows) for token in _early_stops(row)))
    _apply_penalties(logits, [(i, row) for i, row in enumerate(rows) if row.request.has_penalties])


def _apply_grammar(logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
    masked = [(i, row.grammar_mask) for i, row in enumerate(rows) if row.grammar_mask is not None]
    if masked:
        mask = torch.from_numpy(np.stack([mask for _, mask in masked])).to(logits.device)
        kernels.apply_bitmask(logits, torch.tensor([i for i, _ in masked], device=logits.device), mask)


def _apply_bias(logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
    triples = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.request.params.logit_bias.items()]
    if triples:
        row, token, bias = zip(*triples, strict=True)
        kernels.add_bias(logits, *_ids(logits, row, token), _floats(logits, bias))


def _ends_of_bad_words(row: RowContext) -> list[int]:
    """Tokens that would complete a bad word; only the output counts, as in vLLM."""
    ends = []
    output = row.output_token_ids
    for word in row.request.params.bad_words_token_ids:
        start = word[:-1]
        if len(start) <= len(output) and output[len(output) - len(start) :].tolist() == list(start):
            ends.append(word[-1])
    return ends


def _early_stops(row: RowContext) -> Sequence[int]:
    """Tokens that would end the output before min_tokens are there."""
    return row.request.stop_ids if len(row.output_token_ids) < row.request.params.min_tokens else ()


def _apply_penalties(logits: torch.Tensor, rows: Sequence[tuple[int, RowContext]]) -> None:
    seen = [(i, np.unique(row.token_ids), row.request.params.repetition_penalty) for i, row in rows]
    seen = [item for item in seen if item[2] != 1.0]
    if seen:
        where, token = _pairs(logits, [(i, ids) for i, ids, _ in seen])
        penalty = np.repeat([p for _, _, p in seen], [len(ids) for _, ids, _ in seen])
        kernels.apply_repetition_penalty(logits, where, token, _floats(logits, penalty))
    said = [(i, row, *np.unique(row.output_token_ids, return_counts=True)) for i, row in rows]
    said = [item for item in said if len(item[2])]
    if said:
        where, token = _pairs(logits, [(i, ids) for i, _, ids, _ in said])
        lengths = [len(ids) for _, _, ids, _ in said]
        frequency = np.repeat([row.request.params.frequency_penalty for _, row, _, _ in said], lengths)
        presence = np.repeat([row.request.params.presence_penalty for _, row, _, _ in said], lengths)
        counts = np.concatenate([counts for _, _, _, counts in said])
        floats = (_floats(logits, values) for values in (counts, frequency, presence))
        kernels.apply_output_penalties(logits, where, token, *floats)


def _mask(logits: torch.Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    found = list(pairs)
    if found:
        kernels.mask_tokens(logits, *_ids(logits, *zip(*found, strict=True)))


def _pairs(logits: torch.Tensor, rows: Sequence[tuple[int, Ints]]) -> tuple[torch.Tensor, torch.Tensor]:
    where = np.repeat([i for i, _ in rows], [len(ids) for _, ids in rows])
    return _ids(logits, where, np.concatenate([ids for _, ids in rows]))


def _ids(logits: torch.Tensor, row: object, token: object) -> tuple[torch.Tensor, torch.Tensor]:
    rows, tokens = (torch.from_numpy(np.asarray(x, np.int64)).to(logits.device) for x in (row, token))
    return rows, tokens


def _floats(logits: torch.Tensor, values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float32)).to(logits.device)
