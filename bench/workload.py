"""Reads the committed workload files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

WORKLOADS = Path(__file__).parent / "workloads"


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


def load(name: str, limit: int | None = None) -> Workload:
    """The workload of that name, or its first `limit` requests."""
    rows = [json.loads(line) for line in (WORKLOADS / f"{name}.jsonl").read_text().splitlines()][:limit]
    return Workload(name, [row["prompt_token_ids"] for row in rows], [row["max_tokens"] for row in rows])
