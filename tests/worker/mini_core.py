"""A core in a hundred lines: it makes plans by hand and keeps what a real core would keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagewire.columns import int32
from pagewire.engine import LogprobColumns
from pagewire.plan import NewRequest, StepPlan, StepResult
from pagewire.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Req:
    """A request as the mini core sees it."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams = field(default_factory=lambda: GREEDY)
    child_index: int = 0
    eos: tuple[int, ...] = ()
    prompt_logprobs_start: int = 1
    slot: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_known: bool = False
    error: str = ""
    logprobs: list[LogprobColumns] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, LogprobColumns]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def request(prompt: Sequence[int], params: SamplingParams = GREEDY, **changes: object) -> Req:
    return Req(list(prompt), len(prompt), params, **changes)  # type: ignore[arg-type]


class MiniCore:
    """Plans for an executor: `execute(plan) -> result`. Rows are given as (request, tokens, drafts)."""

    def __init__(
        self, execute: Callable[[StepPlan], StepResult], *, num_blocks: int, block_size: int, epoch: int = 1
    ) -> None:
        self.execute = execute
        self.block_size = block_size
        self.epoch = epoch
        self.step = 0
        self.free_blocks = list(range(num_blocks - 1, 0, -1))
        self.free_slots = list(range(64))
        self.released: list[int] = []

    def plan(self, rows: Sequence[tuple[Req, int] | tuple[Req, int, list[int]]], **changes: object) -> StepPlan:
        """The next plan; `rows` schedules so many tokens of each request, its drafts among them."""
        columns: dict[str, list[int]] = {name: [] for name in ("slots", "n", "computed", "sampled", "blocks", "drafts")}
        new_blocks: list[int] = []
        drafts: list[int] = []
        new_requests = []
        for req, count, *rest in rows:
            own = list(rest[0]) if rest else []
            is_new = not req.is_known
            if is_new:
                if req.slot < 0:
                    req.slot = self.free_slots.pop()
                new_requests.append(
                    NewRequest(
                        req.slot,
                        "frontend",
                        id(req) % 2**31,
                        int32(req.tokens),
                        req.num_prompt,
                        req.params,
                        req.child_index,
                        req.eos,
                        prompt_logprobs_start=req.prompt_logprobs_start,
                    )
                )
                req.is_known = True
            end = req.computed + count
            wanted = -(-end // self.block_size)
            fresh = [self.free_blocks.pop() for _ in range(wanted - len(req.blocks))]
            given = req.blocks + fresh if is_new else fresh  # a new request may start with shared blocks
            req.blocks += fresh
            new_blocks += given
            reaches = end == len(req.tokens) + len(own)
            values = (req.slot, count, req.computed, 1 + len(own) if reaches else 0, len(given), len(own))
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
            drafts += own
        self.step += 1
        released, self.released = self.released, []
        plan = StepPlan(
            epoch=self.epoch,
            step=self.step,
            slots=int32(columns["slots"]),
            num_scheduled_tokens=int32(columns["n"]),
            num_computed_tokens=int32(columns["computed"]),
            num_sampled_tokens=int32(columns["sampled"]),
            num_new_blocks=int32(columns["blocks"]),
            new_block_ids=int32(new_blocks),
            released_slots=int32(released),
            new_requests=new_requests,
            num_draft_tokens=int32(columns["drafts"]) if drafts else int32([]),
            draft_token_ids=int32(drafts),
        )
        for name, value in changes.items():
            setattr(plan, name, value)
        return plan

    def run(self, rows: Sequence[tuple[Req, int] | tuple[Req, int, list[int]]], **changes: object) -> StepResult:
        """Plans, executes and takes over a step."""
        plan = self.plan(rows, **changes)
        result = self.execute(plan)
        self.take(rows, result)
        return result

    def take(self, rows: Sequence[tuple[Req, int] | tuple[Req, int, list[int]]], result: StepResult) -> None:
        """Commits a result to the requests of the rows."""
        ends = np.cumsum(result.num_tokens)
        tokens = {
            slot: result.token_ids[end - count : end].tolist()
            for slot, count, end in zip(result.slots.tolist(), result.num_tokens.tolist(), ends.tolist(), strict=True)
        }
        for req, count, *rest in rows:
            own = len(rest[0]) if rest else 0
            if req.slot in result.errors:
                req.error = result.errors[req.slot]
                continue
            emitted = tokens.get(req.slot, [])
            req.computed += count - own + max(len(emitted) - 1, 0)
            req.tokens += emitted
            if req.slot in result.logprobs:
                req.logprobs.append(result.logprobs[req.slot])
            if req.slot in result.prompt_logprobs:
                req.prompt_logprobs.append(result.prompt_logprobs[req.slot])

    def release(self, req: Req, *, keep_blocks: bool = False) -> None:
        """Gives slot and blocks back; the worker learns it with the next plan."""
        self.released.append(req.slot)
        self.free_slots.append(req.slot)
        if not keep_blocks:
            self.free_blocks += reversed(req.blocks)
        req.blocks, req.computed, req.slot, req.is_known = [], 0, -1, False

    def generate(self, requests: Sequence[Req], num_tokens: int, budget: int = 10**9) -> list[list[int]]:
        """Runs until every request has so many output tokens; prefills in chunks of the budget, requests in order."""
        for _ in range(10_000):
            left, rows = budget, []
            for req in requests:
                debt = len(req.tokens) - req.computed
                if len(req.output) < num_tokens and not req.error and left:
                    rows.append((req, min(debt, left)))
                    left -= rows[-1][1]
            if not rows:
                return [req.output for req in requests]
            self.run(rows)
        raise AssertionError("no end")
