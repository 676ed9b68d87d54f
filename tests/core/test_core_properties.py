"""DESIGN's invariants 1 to 5 over random arrivals, lengths, aborts, priorities, pools, pauses and failures.

The harness checks the invariants at every step, the fake worker checks every plan and every KV position, and each
request's tokens are compared with what the fake model says without any engine: that is sameness under every budget,
chunk, cache hit, pool size, batch, priority and preemption at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from core_support import EOS, Harness, assert_engine_empty, expected_tokens, make_request, params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_svc.fake_executor import FakeOptions
from core_svc.fake_model import FakeModel
from pagewire.engine import (
    AbortReason,
    EngineRequest,
    FinishReason,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from pagewire.errors import InternalError, InvalidArgumentError

FRONTENDS = ("frontend-a", "frontend-b", "frontend-c")
MAX_STEPS = 4000
FLAVORS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"skip_reading_prefix_cache": True},
]


@dataclass
class Arrival:
    """A request and when it comes."""

    step: int
    frontend: str
    request: EngineRequest
    abort_after: int | None
    is_aborted_while_executing: bool


@st.composite
def arrivals(draw: Callable[..., Any]) -> list[Arrival]:
    """Up to 14 requests; prompts share prefixes often, so that the cache is hit."""
    found = []
    for request_id in range(draw(st.sampled_from([1, 2, 4, 6, 8, 10, 12]))):
        stem = draw(st.integers(0, 1))
        length = draw(st.one_of(st.integers(1, 12), st.integers(13, 60)))
        shared = draw(st.sampled_from([0, length // 2, length, length]))
        prompt = [(stem * 7919 + i * 13) % 900 + 3 for i in range(shared)]
        prompt += [(request_id * 131 + i * 7) % 997 + 3 for i in range(length - shared)]
        max_tokens = draw(st.integers(1, 30))
        flavor = draw(st.sampled_from(FLAVORS))
        model = FakeModel(eos_token_id=EOS)
        output = model.generate(prompt, params(seed=stem), draw(st.sampled_from([0, 0, 0, max_tokens // 2])))
        found.append(
            Arrival(
                step=draw(st.integers(0, 25)),
                frontend=draw(st.sampled_from(FRONTENDS)),
                request=make_request(
                    request_id,
                    prompt,
                    params(
                        max_tokens,
                        seed=stem,
                        min_tokens=draw(st.sampled_from([0, 0, max_tokens // 2, max_tokens])),
                        ignore_eos=draw(st.booleans()),
                        **flavor,
                    ),
                    output=output,
                    priority=draw(st.integers(-2, 2)),
                    arrival_time_ns=draw(st.integers(0, 5)),
                    cache_salt=draw(st.sampled_from(["", "", "", "", "tenant"])),
                ),
                abort_after=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
                is_aborted_while_executing=draw(st.booleans()),
            )
        )
    return found


@st.composite
def configs(draw: Callable[..., Any]) -> dict[str, Any]:
    """Pools so small that they preempt, budgets from 16 on, both policies."""
    return {
        "block_size": draw(st.sampled_from([1, 2, 4, 4, 8, 16])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([16, 17, 31, 64, 2048])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5, 20])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 3])),
        "async_scheduling": draw(st.booleans()),
    }


@dataclass
class Scenario:
    config: dict[str, Any]
    arrivals: list[Arrival]
    pool_tokens: int
    eos_rate: float
    num_drafts: int
    draft_acceptance: float
    events: dict[int, str]
    failing_plan: int


@st.composite
def scenarios(draw: Callable[..., Any], *, has_events: bool = True, has_failures: bool = False) -> Scenario:
    kinds = ["keep", "wait", "resume", "reset", "preempt", "sleep", "drop"] if has_events else []
    events = draw(st.dictionaries(st.integers(0, 40), st.sampled_from(kinds), max_size=5)) if kinds else {}
    return Scenario(
        config=draw(configs()),
        arrivals=draw(arrivals()),
        pool_tokens=draw(st.sampled_from([32, 64, 96, 128, 400, 2000])),
        eos_rate=draw(st.sampled_from([0.0, 0.02, 0.2])),
        num_drafts=draw(st.sampled_from([0, 0, 1, 4])),
        draft_acceptance=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        events=events,
        failing_plan=draw(st.integers(1, 30)) if has_failures else 0,
    )


class Play:
    """Plays a scenario on an engine and checks what came out of it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.options = FakeOptions(
            num_drafts=scenario.num_drafts,
            draft_acceptance=scenario.draft_acceptance,
            failures={scenario.failing_plan: InternalError("injected")} if scenario.failing_plan else {},
        )
        self.harness = Harness(
            num_blocks=1 + -(-scenario.pool_tokens // scenario.config["block_size"]),
            options=self.options,
            model=FakeModel(eos_token_id=EOS, eos_rate=scenario.eos_rate),
            **scenario.config,
        )
        self.added: list[Arrival] = []
        self.dropped: set[str] = set()
        self.while_executing: list[Arrival] = []
        self.options.while_executing = self._abort_while_executing

    def _abort(self, arrival: Arrival) -> None:
        self.harness.engine.abort(arrival.frontend, [arrival.request.request_id], AbortReason.CLIENT)

    def _abort_while_executing(self, plan: object) -> None:
        aborts, self.while_executing = self.while_executing, []
        for arrival in aborts:
            self._abort(arrival)

    def _arrive(self, now: int) -> None:
        for arrival in self.scenario.arrivals:
            if arrival.step == now and arrival.frontend not in self.dropped:
                try:
                    self.harness.add(arrival.request, frontend=arrival.frontend)
                    self.added.append(arrival)
                except InvalidArgumentError:
                    limit = self.harness.engine.model.max_model_len
                    assert len(arrival.request.prompt_token_ids) + arrival.request.sampling_params.max_tokens > limit
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == now:
                if arrival.is_aborted_while_executing:
                    self.while_executing.append(arrival)
                else:
                    self._abort(arrival)

    def _event(self, kind: str | None) -> None:
        engine = self.harness.engine
        match kind:
            case "keep":
                engine.utility(Pause(PauseMode.KEEP))
            case "wait":
                engine.utility(Pause(PauseMode.WAIT))
            case "resume":
                engine.utility(Resume())
            case "reset":
                engine.utility(ResetPrefixCache(preempt_running=True))
            case "preempt":
                self.harness.scheduler.preempt_all()
            case "sleep":
                engine.utility(Sleep(1))
            case "drop":
                self.dropped.add("frontend-c")
                engine.drop_frontend("frontend-c", AbortReason.LEASE_EXPIRED)

    def run(self) -> None:
        """Plays all arrivals and events, then lets everything finish."""
        for now in range(46):
            self._arrive(now)
            self._event(self.scenario.events.get(now))
            self.harness.step()
            if self.scenario.events.get(now - 4) in ("keep", "wait", "sleep"):
                self.harness.engine.utility(WakeUp())
                self.harness.engine.utility(Resume())
        self._abort_while_executing(None)
        self.harness.engine.utility(WakeUp())
        self.harness.engine.utility(Resume())
        self.harness.run(MAX_STEPS)
        self.check()

    def check(self) -> None:
        harness = self.harness
        for arrival in self.added:
            got = harness.of(arrival.request.request_id, arrival.frontend)
            if arrival.frontend in self.dropped:
                if got.finished is None:
                    del harness.collected[arrival.frontend, arrival.request.request_id]
                continue
            assert got.finished is not None, "every request ends"
            expected = expected_tokens(harness, arrival.request)
            if got.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got.tokens == expected
            else:
                assert got.tokens == expected[: len(got.tokens)]
                is_explained = arrival.abort_after is not None or self.scenario.failing_plan
                assert is_explained, "nobody ends a request without a reason"
            self._check_logprobs(arrival, got)
        assert_engine_empty(harness)

    def _check_logprobs(self, arrival: Arrival, got: Any) -> None:
        sampling = arrival.request.sampling_params
        positions = [start + i for start, columns in got.prompt_logprobs for i in range(len(columns))]
        assert positions == list(range(1, len(positions) + 1)), "every prompt position once, in order"
        if sampling.prompt_logprobs is not None and got.tokens:
            assert len(positions) == len(arrival.request.prompt_token_ids) - 1
        if sampling.logprobs is not None:
            chosen = [int(token) for columns in got.logprobs for token in columns.token_ids[:, 0]]
            assert chosen == got.tokens


relaxed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@given(scenarios())
@relaxed
def test_invariants_hold_and_output_is_the_same_whatever_happens(scenario: Scenario) -> None:
    """Progress, ownership, single commit, release and sameness over random scripts.

    Case: vllm#53130
    Case: vllm#48245
    Case: vllm#23347
    Case: vllm#5543
    Case: vllm#14239
    """
    Play(scenario).run()


@given(scenarios(has_events=False, has_failures=True))
@settings(relaxed, max_examples=50)
def test_a_failed_step_harms_nobody_else(scenario: Scenario) -> None:
    Play(scenario).run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_output_does_not_depend_on_budget_cache_pool_or_batch(policy: str) -> None:
    """The same 12 requests under every setting; the small pools preempt, the shared prefixes hit.

    Case: vllm#5543
    """
    outputs = set()
    num_preemptions = num_hits = 0
    for budget in (16, 23, 64, 2048):
        for caching in (True, False):
            for num_blocks in (14, 200):
                for max_num_seqs in (1, 12):
                    harness = Harness(
                        num_blocks=num_blocks,
                        block_size=8,
                        max_num_batched_tokens=budget,
                        max_num_seqs=max_num_seqs,
                        enable_prefix_caching=caching,
                        policy=policy,
                    )
                    prompts = [[5] * 20 + [i + 10] * (i * 3 + 1) for i in range(12)]
                    harness.add(*(make_request(i, p, params(30), priority=-i % 5) for i, p in enumerate(prompts)))
                    harness.run(MAX_STEPS)
                    outputs.add(tuple(tuple(harness.of(i).tokens) for i in range(12)))
                    stats = harness.engine.stats()
                    num_preemptions += stats.num_preemptions
                    num_hits += stats.prefix_cache_hits
                    assert_engine_empty(harness)
    assert len(outputs) == 1 and num_preemptions > 20 and num_hits > 1000
