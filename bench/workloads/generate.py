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
WINDOW = 448


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
    write("perplexity.jsonl", [{"prompt_token_ids": window, "max_tokens": 1} for window in windows()])


def windows() -> list[list[int]]:
    """perplexity.txt in windows of equal length, each of which is scored by itself; the rest is left out."""
    from worker_svc.models.sources import locate
    from worker_svc.models.tokenizer_files import load_tokenizer

    ids = load_tokenizer(locate("smollm2"))((HERE / "perplexity.txt").read_text())["input_ids"]
    return [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]


if __name__ == "__main__":
    main()
