"""The sampling parameters of all slots as columns, so that a step gathers them without a loop over requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import Draws
from worker_svc.slot_request import SlotRequest

_MIN_TEMPERATURE = np.float32(1e-30)
"""Below it a division by the temperature would meet numbers that some processors flush to zero."""


PROCESSORS, RANDOM, LOGPROBS, MIN_TOKENS, PROMPT_LOGPROBS = 1, 2, 4, 8, 16
"""What a request wants besides the likeliest token of the model's own logits, as bits."""


class SamplingState:
    """Columns over slots, set when a request takes its slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self.wants = np.zeros(max_num_seqs, np.uint8)
        """The bits above: a step looks first whether any of its rows has one at all."""
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.child_indices = np.zeros(max_num_seqs, np.int64)
        self.first_free_stop = np.zeros(max_num_seqs, np.int64)
        """Sequence length from which stop ids may be sampled: prompt and min_tokens."""

    def set(self, slot: int, request: SlotRequest) -> None:
        """Takes over a request's parameters, which are valid."""
        p = request.params
        temperature = np.float32(p.temperature)
        has_min_tokens = bool(p.min_tokens and request.stop_ids)
        self.wants[slot] = (
            PROCESSORS * request.has_processors
            | RANDOM * bool(temperature != 0.0)
            | LOGPROBS * request.wants_logprobs
            | MIN_TOKENS * has_min_tokens
            | PROMPT_LOGPROBS * (p.prompt_logprobs is not None)
        )
        self.temperature[slot] = max(temperature, _MIN_TEMPERATURE)
        self.top_k[slot] = p.top_k
        # Rounded as the wire rounds them: the same request samples the same in one process and over gRPC.
        self.top_p[slot] = np.float32(p.top_p)
        self.min_p[slot] = np.float32(p.min_p)
        self.seeds[slot] = np.uint64(p.seed or 0).astype(np.int64)
        self.child_indices[slot] = request.child_index
        self.first_free_stop[slot] = request.num_prompt_tokens + (p.min_tokens if has_min_tokens else 0)

    def wanted(self, slots: npt.NDArray[np.int32]) -> int:
        """The bits that any of these slots has."""
        return int(np.bitwise_or.reduce(self.wants[slots]))

    def columns(self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.generic]]:
        """How to sample the token after `lengths` tokens, per row: the fields of Draws in order."""
        before = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds)
        return [*(values[slots] for values in before), lengths, self.child_indices[slots]]

    def draws(self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], device: torch.device) -> Draws:
        """The same on a device."""
        return Draws(*(torch.from_numpy(column).to(device) for column in self.columns(slots, lengths)))
