"""The settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.errors import FieldViolation, InvalidArgumentError, violation

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine schedules. Raises InvalidArgumentError where a value is out of range."""

    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 128
    """Most requests that run at once; also the number of worker slots."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    long_prefill_token_threshold: int = 0
    """Most tokens that one request gets in one step; 0 is no limit."""
    policy: str = "fcfs"
    """Order of requests: "fcfs" (arrival at the core) or "priority" (priority, then arrival at the frontend)."""
    enable_prefix_caching: bool = True
    max_num_requests: int = 4096
    """Most requests held at once, running and waiting."""
    prefill_schedule_interval: int = 1
    """Prefills get a turn in every so many steps while decodes run; 1 is every step."""
    max_logprob_candidates: int = 2**22
    """Most (token, log-probability) pairs of one step, 8 bytes each: what its messages have room for."""
    async_scheduling: bool = True
    """Plan the next step while one runs, so that the worker never waits for the core. Output is the same."""
    log_requests: bool = False
    """Log one line per request and step."""
    tombstone_ttl_s: float = 60.0
    """How long an abort of an unknown id, and the id of an ended request, are remembered."""
    max_tombstones: int = 65536
    """How many of them are remembered; the oldest go first."""

    def __post_init__(self) -> None:
        found: list[FieldViolation] = [
            violation(name, getattr(self, name), f"must be at least {low}")
            for name, low in (
                ("block_size", 1),
                ("max_num_seqs", 1),
                ("max_num_batched_tokens", 1),
                ("long_prefill_token_threshold", 0),
                ("max_num_requests", 1),
                ("prefill_schedule_interval", 1),
                ("max_logprob_candidates", 1),
                ("max_tombstones", 1),
            )
            if getattr(self, name) < low
        ]
        if self.policy not in POLICIES:
            found.append(violation("policy", self.policy, f"must be one of {', '.join(POLICIES)}"))
        if found:
            raise InvalidArgumentError(found)
