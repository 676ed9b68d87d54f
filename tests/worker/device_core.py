"""A core over a runner that launches steps on a CPU that stands for a device, and what it expects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from pagewire.plan import StepResult
from pagewire.sampling import SamplingParams
from tests.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, make_runner
from tests.worker.mini_core import MiniCore, Req, request
from worker_svc.compute import Deferred
from worker_svc.runner import ModelRunner

PROMPT = [5, 17, 3, 88, 41, 9, 2, 60]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=2**63 + 77)
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)


def device_core(**changes: Any) -> MiniCore:
    return MiniCore(make_runner(is_device=True, **changes).start, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def runner_of(core: MiniCore) -> ModelRunner:
    return core.execute.__self__  # type: ignore[attr-defined,no-any-return]


def ahead(core: MiniCore, rows: Sequence[tuple[Any, ...]]) -> Any:
    """Launches the next step on the assumption that every row whose end is reached gets one more token."""
    plan = core.plan(rows)  # type: ignore[arg-type]
    for req, count, *_ in rows:
        req.computed += count
        if req.computed == len(req.tokens):
            req.tokens.append(0)
    return core.execute(plan)


def remembered(core: MiniCore, requests: Sequence[Req]) -> Callable[[], None]:
    """What puts a core and its requests back to where they are now."""
    names = ("step", "free_blocks", "free_slots", "released")
    state = copy.deepcopy([getattr(core, name) for name in names])
    theirs = [{**vars(req), "tokens": [*req.tokens], "blocks": [*req.blocks]} for req in requests]

    def back() -> None:
        for name, value in zip(names, copy.deepcopy(state), strict=True):
            setattr(core, name, value)
        for req, values in zip(requests, theirs, strict=True):
            vars(req).update(values, tokens=[*values["tokens"]], blocks=[*values["blocks"]])

    return back


def finish(started: Any) -> StepResult:
    assert isinstance(started, Deferred)
    return started.finish()  # type: ignore[no-any-return]


def by_slot(result: StepResult) -> dict[int, int]:
    return dict(zip(result.slots.tolist(), result.token_ids.tolist(), strict=True))


def alone(prompt: Sequence[int], params: SamplingParams, num_tokens: int, **changes: Any) -> list[int]:
    """What a request gets on a CPU, step by step."""
    core = MiniCore(make_runner().execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return core.generate([request(prompt, params, **changes)], num_tokens)[0]
