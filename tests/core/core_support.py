"""An engine with a fake worker, whose outputs and invariants are checked at every step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from core_svc.config import EngineConfig
from core_svc.engine import EngineCore
from core_svc.executor import ModelSpec
from core_svc.executor_link import InFlight
from core_svc.fake_executor import FakeExecutor, FakeOptions
from core_svc.fake_model import FakeModel
from core_svc.kv_events import KvEvent
from core_svc.plan_builder import ScheduledStep
from core_svc.request import Request
from core_svc.scheduler import Scheduler
from pagewire.engine import EngineRequest, Finished, FinishReason, LogprobColumns, StepOutputs
from pagewire.plan import StepPlan
from pagewire.sampling import SamplingParams

EOS = 2
FRONTEND = "frontend-a"


def params(max_tokens: int | None = 8, **changes: object) -> SamplingParams:
    """Greedy parameters with changes."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **changes})  # type: ignore[arg-type]


def make_request(
    request_id: int,
    prompt: int | Sequence[int],
    sampling_params: SamplingParams | None = None,
    *,
    output: Sequence[int] = (),
    **changes: object,
) -> EngineRequest:
    """A request; a number as prompt makes so many tokens that depend on the request id."""
    tokens = [(request_id * 131 + i * 7) % 997 + 3 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=np.array(tokens, np.int32),
        sampling_params=sampling_params or params(),
        eos_token_ids=(EOS,),
        output_token_ids=np.array(output, np.int32),
        **changes,  # type: ignore[arg-type]
    )


@dataclass
class Collected:
    """What a frontend got of one request."""

    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    started: int | None = None
    logprobs: list[LogprobColumns] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, LogprobColumns]] = field(default_factory=list)
    first_offset: int | None = None
    num_messages: int = 0

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None


class Harness:
    """An engine, its fake worker, and a strict reader of its outputs."""

    def __init__(
        self,
        *,
        num_blocks: int = 200,
        options: FakeOptions | None = None,
        model: FakeModel | None = None,
        max_model_len: int = 4096,
        record_events: bool = False,
        async_scheduling: bool = False,
        **config: object,
    ) -> None:
        self.config = EngineConfig(async_scheduling=async_scheduling, **config)  # type: ignore[arg-type]
        self.in_flight: InFlight | None = None
        self.executor = FakeExecutor(
            num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            model=model or FakeModel(eos_token_id=EOS),
            max_model_len=max_model_len,
            options=options,
        )
        self.collected: dict[tuple[str, int], Collected] = {}
        self.messages: list[tuple[str, StepOutputs]] = []
        self.events: list[KvEvent] = []
        self.plans: list[StepPlan] = []
        self.steps: list[ScheduledStep] = []
        self.engine = EngineCore(
            self.executor,
            self.executor.load_model(ModelSpec()),
            self.executor.cache,
            self.config,
            self.publish,
            self.events.extend if record_events else None,
        )
        self._record_plans(self.engine.scheduler)

    def _record_plans(self, scheduler: Scheduler) -> None:
        schedule = scheduler.schedule

        def recording(**arguments: bool) -> ScheduledStep | None:
            step = schedule(**arguments)
            if step is not None:
                self.plans.append(step.plan)
                self.steps.append(step)
            return step

        scheduler.schedule = recording  # type: ignore[method-assign]

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def live(self, request_id: int, frontend: str = FRONTEND) -> Request:
        return self.scheduler.requests[frontend, request_id]

    def of(self, request_id: int, frontend: str = FRONTEND) -> Collected:
        return self.collected.setdefault((frontend, request_id), Collected())

    def add(self, *requests: EngineRequest, frontend: str = FRONTEND) -> None:
        self.engine.add(frontend, requests)

    def publish(self, frontend: str, outputs: StepOutputs) -> None:
        """Checks a message as strictly as invariants 3 and 4 say: in order, without gaps, nothing after the end."""
        self.messages.append((frontend, outputs))
        ids = outputs.request_ids.tolist()
        assert ids and len(set(ids)) == len(ids), "a request has one row in a message"
        assert len(ids) == len(outputs.offsets) == len(outputs.num_tokens)
        assert int(outputs.num_tokens.sum()) == len(outputs.token_ids)
        start = 0
        for row, request_id in enumerate(ids):
            got, num = self.of(request_id, frontend), int(outputs.num_tokens[row])
            assert got.finished is None, f"request {request_id} gets something after its end"
            if got.first_offset is None:
                got.first_offset = int(outputs.offsets[row])
            assert got.first_offset + len(got.tokens) == int(outputs.offsets[row]), "a token is lost or doubled"
            got.tokens.extend(outputs.token_ids[start : start + num].tolist())
            got.num_messages += 1
            start += num
            if row in outputs.started:
                assert got.started is None, "a request starts once"
                got.started = outputs.started[row]
            if row in outputs.logprobs:
                assert len(outputs.logprobs[row]) == num
                got.logprobs.append(outputs.logprobs[row])
            if row in outputs.prompt_logprobs:
                got.prompt_logprobs.append(outputs.prompt_logprobs[row])
        for finished in outputs.finished:
            got = self.of(ids[finished.row], frontend)
            assert got.finished is None, "a request ends once"
            got.finished = finished

    def step(self) -> bool:
        """One step: committed at its end, or with async_scheduling while the next one is in flight."""
        if self.config.async_scheduling:
            before = (len(self.plans), len(self.messages), self.in_flight)
            self.in_flight = self.engine.step_ahead(self.in_flight)
            has_done = before != (len(self.plans), len(self.messages), self.in_flight)
        else:
            has_done = self.engine.step()
        self.check_invariants()
        return has_done

    def run(self, max_steps: int = 2000) -> int:
        """Steps until nothing is left to do; returns the number of steps. Fails if that does not come."""
        for count in range(max_steps):
            if not self.engine.has_work() and self.in_flight is None:
                return count
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def check_invariants(self) -> None:
        """DESIGN's invariants 1, 2 and 4 as far as the core holds them between steps."""
        scheduler = self.scheduler
        assert not self.executor.violations, self.executor.violations
        check_pool(scheduler)
        running = scheduler.running
        assert len(running) <= self.config.max_num_seqs
        assert [r.order for r in running] == sorted(r.order for r in running)
        slots = [r.slot for r in running]
        assert len(set(slots)) == len(slots) and all(0 <= s < self.config.max_num_seqs for s in slots)
        assert len(scheduler.waiting) + len(running) == len(scheduler.requests)
        for request in scheduler.requests.values():
            assert not request.status.is_finished
            num_expected = request.num_tokens + request.num_output_placeholders
            assert request.num_computed_tokens < num_expected and request.num_tokens <= request.max_num_tokens
            assert self.in_flight is not None or not request.num_output_placeholders
            assert len(request.blocks) * self.config.block_size >= request.num_computed_tokens
            if self.config.enable_prefix_caching and self.in_flight is None:
                full = request.blocks[: request.num_computed_tokens // self.config.block_size]
                assert all(block.block_hash is not None for block in full), "a full, committed block can be found"
        if self.plans:
            assert self.plans[-1].total_num_scheduled_tokens <= self.config.max_num_batched_tokens


def check_pool(scheduler: Scheduler) -> None:
    """Ownership: references are counted right, free and referenced exclude each other, hashes are of full blocks."""
    pool = scheduler.kv.pool
    refs = [0] * len(pool.blocks)
    for request in scheduler.requests.values():
        for block in request.blocks:
            refs[block.block_id] += 1
        num_committed_full = min(request.num_computed_tokens, request.num_tokens) // scheduler.kv.block_size
        assert all(block.block_hash is None for block in request.blocks[num_committed_full:])
    assert [block.ref_cnt for block in pool.blocks] == refs
    free = [block.block_id for block in pool.free_queue]
    assert len(free) == len(set(free)) == pool.num_free_blocks
    assert set(free) == {block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0}
    assert pool.null_block.ref_cnt == 0 and pool.null_block.block_hash is None
    cached = {b.block_id: h for h, b in pool.cached_blocks.items()}
    cached |= {b.block_id: h for h, blocks in pool.twin_blocks.items() for b in blocks.values()}
    assert all(blocks for blocks in pool.twin_blocks.values()) and pool.twin_blocks.keys() <= pool.cached_blocks.keys()
    assert cached == {b.block_id: b.block_hash for b in pool.blocks if b.block_hash is not None}


def assert_engine_empty(harness: Harness) -> None:
    """After everything ended: no request, every block free, no reference, no slot used here or at the worker."""
    scheduler = harness.scheduler
    harness.check_invariants()
    assert not scheduler.requests and not scheduler.running and len(scheduler.waiting) == 0
    assert scheduler.waiting.peek() is None
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_usable_blocks
    assert all(block.ref_cnt == 0 for block in scheduler.kv.pool.blocks)
    assert not scheduler.kv._coming, "nobody is about to compute a block"
    assert not harness.executor.used_slots, "an empty step flushes the released slots"
    assert not scheduler.has_work
    assert all(got.finished is not None for got in harness.collected.values())


def run_one(harness: Harness, request: EngineRequest) -> Collected:
    """Runs one request alone to its end."""
    harness.add(request)
    harness.run()
    return harness.of(request.request_id)


def expected_tokens(harness: Harness, request: EngineRequest) -> list[int]:
    """What the fake model says to a request, ended by max_tokens, end-of-sequence or a stop token; no other engine."""
    sampling = request.sampling_params
    known = [*request.prompt_token_ids.tolist(), *request.output_token_ids.tolist()]
    most = min(
        len(request.prompt_token_ids) + (sampling.max_tokens or 10**9), harness.engine.model.max_model_len
    ) - len(known)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    tokens = harness.executor.model.generate(known, sampling, most)
    for idx, token in enumerate(tokens):
        if token in stops and len(request.output_token_ids) + idx + 1 >= sampling.min_tokens:
            return tokens[: idx + 1]
    return tokens


@contextmanager
def running_engine(harness: Harness) -> Iterable[threading.Thread]:  # type: ignore[misc]
    """The engine's busy loop on a thread of its own; stopped at the end."""
    thread = threading.Thread(target=harness.engine.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        harness.engine.shutdown()
        thread.join(10)
        assert not thread.is_alive()


def at_plan(count: int, action: Callable[[], object]) -> Callable[[StepPlan], None]:
    """A `while_executing` that acts during the count-th plan, from 1."""
    seen = 0

    def hook(plan: StepPlan) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            action()

    return hook
