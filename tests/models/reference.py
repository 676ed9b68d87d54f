"""What transformers itself computes, in eager attention and float32: the yardstick of sameness.

`check_greedy` applies the rule of DESIGN.md's invariant 5: output is token-identical, except that where the reference's
best logits lie within NEAR_TIE of each other either token will do, and the comparison goes on from the token taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from worker_svc.models.gguf_files import gguf_progress, shared_gguf_parsing

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Greedy:
    """How an output compares with the reference's greedy choices."""

    num_tokens: int
    num_near_ties: int
    """Places where the output took another token than the reference's best, within NEAR_TIE of it."""


class Reference:
    """A transformers model of a local directory or GGUF file, with its tokenizer."""

    def __init__(self, path: Path) -> None:
        directory, files = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        with shared_gguf_parsing(), gguf_progress(lambda fraction: None):
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager", **files
            ).eval()
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, **files)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits [len(token_ids), vocab_size] of one dense pass."""
        logits: torch.Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """transformers' own greedy generation; ends with an end-of-sequence token or after max_tokens."""
        ids = torch.tensor([list(prompt_ids)])
        settings = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=list(eos_token_ids) or -1, pad_token_id=0
        )
        result = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        output: list[int] = result[0, len(prompt_ids) :].tolist()
        return output

    def check_greedy(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Greedy:
        """Asserts that an output is the reference's greedy continuation of the prompt, near ties aside."""
        rows = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        assert len(rows) == len(output_ids) > 0
        num_near_ties = 0
        for place, (row, token) in enumerate(zip(rows, output_ids, strict=True)):
            best = int(row.argmax())
            if token == best:
                continue
            gap = float(row[best] - row[token])
            assert gap <= NEAR_TIE, f"output token {place} is {token}, the reference's is {best}, better by {gap:.3g}"
            num_near_ties += 1
        return Greedy(len(output_ids), num_near_ties)
