"""Makes the committed workload files; run it only to change them.

Prompts are token ids (no tokenizer takes part in what is measured) drawn uniformly from SmolLM2's plain vocabulary,
lengths uniformly from the stated ranges, all from one fixed seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FIRST_PLAIN_TOKEN, VOCAB_SIZE = 17, 49152
SEED = 20261130


def write(name: str, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (HERE / name).write_text(text)


def main() -> None:
    rng = np.random.default_rng(SEED)

    def tokens(count: int) -> list[int]:
        return rng.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, count).tolist()

    batch = [
        {"prompt_token_ids": tokens(int(rng.integers(32, 513))), "max_tokens": int(rng.integers(16, 257))}
        for _ in range(64)
    ]
    write("batch.jsonl", batch)
    prefix = tokens(512)
    write("shared_prefix.jsonl", [{"prompt_token_ids": prefix + tokens(32), "max_tokens": 32} for _ in range(32)])
    write("single_stream.jsonl", [{"prompt_token_ids": tokens(128), "max_tokens": 128}])


if __name__ == "__main__":
    main()
