"""The workloads: what every side is given, as token ids and numbers of tokens to generate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

WORKLOADS = Path(__file__).parent / "workloads"
STEP_PROMPT_TOKENS = 32
STEP_SHORT, STEP_LONG = 8, 72


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, each with the number of tokens to generate (greedily, stops ignored)."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    def with_max_tokens(self, max_tokens: int) -> Workload:
        """The same prompts with so many tokens each."""
        return Workload(self.name, self.prompts, [max_tokens] * len(self.prompts))

    def __str__(self) -> str:
        shape = f"{self.num_prompt_tokens} + {self.num_output_tokens} tokens"
        return f"{self.name} ({len(self.prompts)} request{'s' * (len(self.prompts) > 1)}, {shape})"


def load(name: str, limit: int | None = None) -> Workload:
    """The committed workload of that name, or its first `limit` requests."""
    rows = [json.loads(line) for line in (WORKLOADS / f"{name}.jsonl").read_text().splitlines()][:limit]
    return Workload(name, [row["prompt_token_ids"] for row in rows], [row["max_tokens"] for row in rows])


def decode_steps(batch: int) -> tuple[Workload, Workload]:
    """Two workloads of so many equal requests that differ by STEP_LONG - STEP_SHORT decode steps and nothing else."""
    prompts = [prompt[:STEP_PROMPT_TOKENS] for prompt in load("batch", batch).prompts]
    assert len(prompts) == batch
    short = Workload(f"batch {batch}", prompts, [STEP_SHORT] * batch)
    return short, short.with_max_tokens(STEP_LONG)
