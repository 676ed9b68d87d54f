"""A deterministic stand-in for a language model: the next token is a hash of all tokens before it.

Any token that is wrong, lost, doubled or out of place changes everything after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.sampling import SamplingParams

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
Hashes = npt.NDArray[np.uint64]


def mix(value: int) -> int:
    """SplitMix64's finalizer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def prefix_hashes(token_ids: Sequence[int] | npt.NDArray[np.int32], start: int = 0, before: int = 0) -> Hashes:
    """For each token the hash of the sequence up to it, given the hash `before` of the `start` tokens in front."""
    tokens = np.asarray(token_ids, np.uint64)
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    values = tokens * np.uint64(0xD1342543DE82EF95) + positions * np.uint64(_GOLDEN) + np.uint64(1)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: Hashes = np.cumsum(values, dtype=np.uint64) + np.uint64(before)
    return hashes


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Says which token follows a sequence; eos_rate is the share of end-of-sequence tokens. Ids 0 to 2 are special."""

    vocab_size: int = 50_000
    eos_token_id: int = 2
    eos_rate: float = 0.0

    def next_token(self, prefix_hash: int, params: SamplingParams) -> int:
        """The token after a sequence with this hash; the request's seed counts too."""
        value = mix(int(prefix_hash) ^ mix(params.seed or 0))
        if (value >> 44) < self.eos_rate * 2**20:
            return self.eos_token_id
        return 3 + value % (self.vocab_size - 3)

    def generate(self, token_ids: Sequence[int], params: SamplingParams, num_tokens: int) -> list[int]:
        """The num_tokens tokens that follow; what a test expects of a request that nothing stops."""
        tokens = list(token_ids)
        prefix = int(prefix_hashes(tokens)[-1])
        for _ in range(num_tokens):
            tokens.append(self.next_token(prefix, params))
            prefix = int(prefix_hashes(tokens[-1:], len(tokens) - 1, prefix)[0])
        return tokens[len(token_ids) :]
