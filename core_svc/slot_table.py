"""What every step asks of the running requests: one array per question, one row per slot.

A request's hot numbers live here while it holds a slot, and in the request itself before and after. The scheduler
reads and writes whole columns, so that a step costs a handful of vector operations however many requests decode.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core_svc.request import NO_SLOT, Request
from pagewire.columns import Int32Column

Slots = npt.NDArray[np.intp]
"""Slots as the table is asked with them: numpy indexes with its own integers in a fifth of the time of int32."""
FREE = np.iinfo(np.int64).max
"""admitted_step of a slot that nobody holds: later than every step."""
NEVER = np.iinfo(np.int32).max
MAX_STOP_IDS = 8
"""Ids that end a request and are looked for by column; a request with more is looked at by itself."""
_NO_TOKEN = -1


class SlotTable:
    """Slots 0 to max_num_seqs - 1, and the running requests in the order in which they are served."""

    def __init__(self, max_num_seqs: int) -> None:
        def column(dtype: npt.DTypeLike = np.int32) -> npt.NDArray[Any]:
            return np.zeros(max_num_seqs, dtype)

        self.max_num_seqs = max_num_seqs
        self.running: Slots = np.empty(0, np.intp)
        """Slots, first served first."""
        self.requests: npt.NDArray[np.object_] = np.full(max_num_seqs, None, np.object_)
        self.admitted_step = np.full(max_num_seqs, FREE, np.int64)
        """Step in which the request got its slot; an older step's result is not for it."""
        self.num_tokens: Int32Column = column()
        self.num_computed_tokens: Int32Column = column()
        self.num_known_tokens: Int32Column = column()
        """num_tokens, and placeholders: most tokens that steps in flight will append."""
        self.num_drafts: Int32Column = column()
        self.num_prompt_tokens: Int32Column = column()
        self.max_num_tokens: Int32Column = column()
        self.min_stop_tokens: Int32Column = column()
        """Tokens, prompt and output, from which on a stop token ends the request."""
        self.num_kv_tokens: Int32Column = column()
        """Positions that the request's blocks have room for."""
        self.next_full_tokens: Int32Column = column()
        """Committed tokens from which on one more block is full and gets its hash."""
        self.last_token_ns: npt.NDArray[np.int64] = column(np.int64)
        self.is_plain: npt.NDArray[np.bool_] = column(np.bool_)
        """A sampled token needs to be appended and looked at for a stop, and nothing else."""
        self.awaits_first_token: npt.NDArray[np.bool_] = column(np.bool_)
        self.is_drafting: npt.NDArray[np.bool_] = column(np.bool_)
        """The worker proposes drafts: a step is planned only when the one before is known."""
        self.num_drafting = 0
        """Requests with is_drafting; no other has num_drafts."""
        self.wants_logprobs: npt.NDArray[np.bool_] = column(np.bool_)
        self.num_wanting_logprobs = 0
        self.stop_ids: Int32Column = np.full((MAX_STOP_IDS, max_num_seqs), _NO_TOKEN, np.int32)
        """End-of-sequence and stop token ids: [MAX_STOP_IDS, slots], of which the first num_stop_ids lines are used."""
        self.num_stop_ids = 0
        self.request_ids: npt.NDArray[np.uint64] = column(np.uint64)
        self.frontends: Int32Column = column()
        """Frontend incarnations, numbered from 0."""
        self.token_ids: Int32Column = np.zeros((max_num_seqs, 0), np.int32)
        """Prompt and output."""
        self._numbers: dict[str, int] = {}
        """Of frontend incarnations."""
        self._has_released = False
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def take(self, request: Request, *, num_computed_tokens: int, next_full_tokens: int, step: int) -> None:
        """Gives a request a slot; line_up gives it its place in running."""
        slot, token_ids = self._free_slots.pop(), request.held_token_ids
        num_tokens, num_prompt_tokens = len(token_ids), request.num_prompt_tokens
        self._make_room(request.max_num_tokens)
        self.token_ids[slot, :num_tokens] = token_ids
        self.requests[slot] = request
        self.frontends[slot], self.request_ids[slot] = self._number_of(request.key[0]), request.key[1]
        self.admitted_step[slot] = step
        self.num_tokens[slot] = self.num_known_tokens[slot] = num_tokens
        self.num_computed_tokens[slot] = num_computed_tokens
        self.num_prompt_tokens[slot] = num_prompt_tokens
        self.max_num_tokens[slot] = request.max_num_tokens
        self.min_stop_tokens[slot] = min(num_prompt_tokens + request.sampling_params.min_tokens, NEVER)
        self.next_full_tokens[slot] = next_full_tokens
        self.last_token_ns[slot] = request.last_token_ns
        if request.wants_logprobs:
            self.wants_logprobs[slot] = True
            self.num_wanting_logprobs += 1
        num_stop_ids = self._set_stop_ids(slot, [*request.eos_token_ids, *request.stop_token_ids])
        self.is_plain[slot] = not request.logprob_width and num_stop_ids <= MAX_STOP_IDS
        self.awaits_first_token[slot] = not request.first_token_ns
        request.slot, request.table = slot, self

    def _set_stop_ids(self, slot: int, stop_ids: list[int]) -> int:
        """Keeps as many of a slot's ids as there are lines; returns how many ids it has."""
        num_stop_ids = len(stop_ids)
        if num_stop_ids > self.num_stop_ids:
            self.num_stop_ids = min(num_stop_ids, MAX_STOP_IDS)
        for line in range(self.num_stop_ids):
            self.stop_ids[line, slot] = stop_ids[line] if line < num_stop_ids else _NO_TOKEN
        return num_stop_ids

    def line_up(self, requests: Sequence[Request]) -> None:
        """Puts requests that took slots, first served first, into running: mostly at the end."""
        if not len(self.running) or self._order_of(self.running[-1]) <= requests[0].order:
            self.running = np.concatenate((self.running, [request.slot for request in requests]))
            return
        for request in requests:
            place = bisect_right(self.running, request.order, key=self._order_of)
            before, after = self.running[:place], self.running[place:]
            self.running = np.concatenate((before, [request.slot], after))

    def release(self, request: Request) -> int:
        """Takes the slot back; the request keeps its own numbers. drop_released takes it out of running."""
        slot = request.slot
        request.held_token_ids = self.token_ids[slot, : self.num_tokens[slot]].copy()
        request.held_num_computed_tokens = int(self.num_computed_tokens[slot])
        request.last_token_ns = int(self.last_token_ns[slot])
        request.slot, request.table = NO_SLOT, None
        self.requests[slot] = None
        self.admitted_step[slot] = FREE
        if self.is_drafting[slot]:
            self.num_drafts[slot] = 0
            self.is_drafting[slot] = False
            self.num_drafting -= 1
        if request.wants_logprobs:
            self.wants_logprobs[slot] = False
            self.num_wanting_logprobs -= 1
        self._has_released = True
        self._free_slots.append(slot)
        return slot

    def drop_released(self) -> None:
        """Takes slots that were released out of running."""
        if self._has_released:
            self.running = self.running[self.admitted_step[self.running] != FREE]
            self._has_released = False

    def placeholders(self, slot: int) -> int:
        """Most tokens that steps in flight will append."""
        return int(self.num_known_tokens[slot] - self.num_tokens[slot])

    def append(self, slot: int, token_id: int) -> None:
        """Puts a token in the place of a placeholder."""
        self.token_ids[slot, self.num_tokens[slot]] = token_id
        self.num_tokens[slot] += 1

    def set_drafts(self, slot: int, num_drafts: int) -> None:
        """The worker proposed drafts, of which so many are to be verified in the next step."""
        if not self.is_drafting[slot]:
            self.is_drafting[slot] = True
            self.num_drafting += 1
        self.num_drafts[slot] = num_drafts

    def by_frontend(self, slots: Slots) -> list[tuple[str, slice | npt.NDArray[np.bool_]]]:
        """The frontends of some slots, each with where in `slots` its own are."""
        if len(self._numbers) == 1:
            return [(name, slice(None)) for name in self._numbers]
        numbers = self.frontends[slots]
        found = set(np.unique(numbers).tolist())
        return [(name, numbers == number) for name, number in self._numbers.items() if number in found]

    def forget_frontend(self, frontend_incarnation: str) -> None:
        """Frees a frontend's number; none of its requests may hold a slot."""
        self._numbers.pop(frontend_incarnation, None)

    def _number_of(self, frontend_incarnation: str) -> int:
        number = self._numbers.get(frontend_incarnation)
        if number is None:
            number = min(set(range(len(self._numbers) + 1)).difference(self._numbers.values()))
            self._numbers[frontend_incarnation] = number
        return number

    def _order_of(self, slot: int) -> tuple[int, int, int]:
        order: tuple[int, int, int] = self.requests[slot].order
        return order

    def _make_room(self, num_tokens: int) -> None:
        """Widens token_ids; pages that nobody wrote to take no memory."""
        width = self.token_ids.shape[1]
        if num_tokens > width:
            wider = np.zeros((self.max_num_seqs, max(num_tokens, 2 * width, 1024)), np.int32)
            wider[:, :width] = self.token_ids
            self.token_ids = wider
