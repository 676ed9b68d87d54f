"""Which of several cores gets a request: where its prompt's beginning may be cached, unless others have less to do.

Requests whose prompts begin alike rank the cores alike (rendezvous hashing: no index, and a core that comes or goes
moves only its own share), and take the first in that order whose load is near the lowest. So one system prompt that
everybody shares does not make one hot core, and what spills over goes to the same second core each time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from pagewire.columns import Int32Column

MAX_PREFIX_TOKENS = 256
MIN_PREFIX_TOKENS = 16
"""Less than a KV block of common size is not cached."""
SLACK_REQUESTS = 4
SLACK_SHARE = 0.25


class Candidate(Protocol):
    """A core that could take the request."""

    @property
    def name(self) -> str:
        """The same for the same core, in every frontend."""
        ...

    @property
    def load(self) -> int:
        """Requests that it has, running and waiting."""
        ...


C = TypeVar("C", bound=Candidate)


def prefix_key(token_ids: Int32Column, cache_salt: str = "") -> bytes:
    """What requests have in common that should meet on one core; empty for a prompt too short to be cached.

    Covers the first 16, 32, ... or 256 tokens: the most that there are. A conversation that grows keeps its key from
    256 tokens on.
    """
    num_tokens = min(len(token_ids), MAX_PREFIX_TOKENS)
    if num_tokens < MIN_PREFIX_TOKENS:
        return b""
    num_tokens = 1 << (num_tokens.bit_length() - 1)
    return blake2b(token_ids[:num_tokens].tobytes() + cache_salt.encode(errors="replace"), digest_size=16).digest()


def choose(candidates: Sequence[C], key: bytes) -> C:
    """The core for a request with this prefix key. `candidates` must not be empty."""
    lowest = min(candidate.load for candidate in candidates)
    if key:
        limit = lowest + max(SLACK_REQUESTS, SLACK_SHARE * lowest)
        near = [candidate for candidate in candidates if candidate.load <= limit]
        return max(near, key=lambda candidate: _score(key, candidate.name))
    return random.choice([candidate for candidate in candidates if candidate.load == lowest])


def _score(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(), key=key, digest_size=8).digest()
