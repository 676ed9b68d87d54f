"""What `make bench-peers` says to the process of one side: a JSON object per line in, one per line out.

Imported by the runners in the peers' own environments, so it needs nothing but the standard library. Requests:

    {"op": "generate", "prompts": [[ids]], "max_tokens": [n]}    greedy, end of sequence ignored, prefix cache emptied
    {"op": NAME, "prompts": [[ids]], "max_tokens": []}           where a side has more to offer

The answer is {"seconds": wall, "token_ids": [[ids]]}, or what the other operation returns; an error is {"error": text}.
The end of the input ends the side.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and numbers of tokens to the tokens of each."""


def answers() -> Callable[[dict[str, object]], None]:
    """A function that writes answers to what is standard output now; from here on, prints go to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, object]) -> None:
        out.write(json.dumps(message, separators=(",", ":")) + "\n")
        out.flush()

    return answer


def serve(
    answer: Callable[[dict[str, object]], None],
    generate: Generate,
    reset: Callable[[], None],
    others: Mapping[str, Callable[[list[list[int]]], object]] | None = None,
) -> None:
    """Answers requests to the end of standard input; `reset` empties the prefix cache, outside the clock."""
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reset()
            if others and request["op"] in others:
                answer({"value": others[request["op"]](request["prompts"])})
                continue
            started = time.perf_counter()
            token_ids = generate(request["prompts"], request["max_tokens"])
            answer({"seconds": time.perf_counter() - started, "token_ids": token_ids})
        except Exception as error:  # the harness reports it in the row that failed
            answer({"error": f"{type(error).__name__}: {error}"})
