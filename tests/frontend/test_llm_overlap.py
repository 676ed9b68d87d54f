"""LLM with overlap: the worker has its next plan before the result of the last one is looked at, and says the same."""

from __future__ import annotations

import itertools
import signal
import statistics
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from frontend_support import SEED, TextExecutor

from core_svc.fake_executor import FakeOptions
from frontend_svc import LLM, FinishReason, RequestOutput, SamplingParams
from frontend_svc.inprocess import WorkerExecutor, make_executor
from pagewire.engine import StepOutputs
from pagewire.errors import InternalError
from pagewire.plan import StepPlan, StepResult

Files = Mapping[str, bytes]
MAX_IDLE_S = 0.0003
"""The bound that the project has set itself for a core behind gRPC; in one process it holds as well."""


def make(executor: TextExecutor, *, async_scheduling: bool = True, **more: int) -> LLM:
    options: dict[str, Any] = {"num_kv_blocks": 500, **more}
    return LLM("fake", executor=executor, async_scheduling=async_scheduling, **options)


class Watched(TextExecutor):
    """Notes when each plan is handed over and when its result is taken."""

    def __init__(self, files: Files, options: FakeOptions | None = None) -> None:
        super().__init__(files, options, 0.0, max_model_len=1024)
        self.log: list[tuple[str, int]] = []

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        log = self.log
        log.append(("plan", plan.step))

        class Noted(Future[StepResult]):
            def result(self, timeout: float | None = None) -> StepResult:
                log.append(("result", plan.step))
                return super().result(timeout)

        future, done = Noted(), super().submit(plan)
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        return future


def test_a_plan_is_handed_over_before_the_last_result_is_taken_and_read(smollm2_files: Files) -> None:
    """Planning, committing and detokenizing happen while the worker has a step to run."""
    executor = Watched(smollm2_files)
    with make(executor) as llm:
        process = llm._outputs.process_outputs

        def noted(outputs: StepOutputs) -> Any:
            executor.log.append(("read", outputs.step))
            return process(outputs)

        llm._outputs.process_outputs = noted  # type: ignore[method-assign]
        llm.generate(["a", "b", "c"], SamplingParams(seed=SEED, max_tokens=6), use_tqdm=False)
        log = list(executor.log)
    assert [step for kind, step in log if kind == "plan"][:7] == [1, 2, 3, 4, 5, 6, 7]
    # The seventh plan tells the worker who has ended, so that six of them have one behind them.
    place = {event: i for i, event in enumerate(log)}
    for step in range(1, 6):
        assert place["plan", step + 1] < place["result", step] < place["plan", step + 2]
    reads = [place[event] for event in log if event[0] == "read"]
    for step, read in enumerate(reads[:5], 1):
        assert place["plan", step + 1] < place["result", step] < read < place["plan", step + 2]


def both_modes(files: Files, prompts: list[str], params: list[SamplingParams], **more: Any) -> list[RequestOutput]:
    """What both modes say of the prompts, which must be the same; returns it once."""
    said = []
    for async_scheduling in (False, True):
        options = FakeOptions(**more.get("options", {}))
        executor = TextExecutor(files, options, more.get("eos_rate", 0.0), max_model_len=1024)
        blocks = more.get("num_kv_blocks", 500)
        with make(executor, async_scheduling=async_scheduling, num_kv_blocks=blocks) as llm:
            said.append(llm.generate(prompts, params, use_tqdm=False))
            assert not llm._core.engine.has_work() and not llm._published and not len(llm._outputs)
            assert (llm.stats().num_preemptions > 0) == (blocks < 100)
            assert executor.violations == [] and executor.used_slots == set()
    in_turn, overlapped = said
    for one, other in zip(in_turn, overlapped, strict=True):
        assert [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in one.outputs] == [
            (c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in other.outputs
        ]
        assert (one.usage, one.finished) == (other.usage, other.finished)
    return overlapped


def test_both_modes_say_the_same(smollm2_files: Files) -> None:
    """Stop strings, several completions, ends that the model says, and different lengths."""
    prompts = [f"Question {i} of many" for i in range(24)]
    plain = both_modes(smollm2_files, prompts, [SamplingParams(seed=i, max_tokens=40) for i in range(24)])
    # A piece of each text, so that most of the requests end by a stop string.
    stops = [output.outputs[0].text[20:24] for output in plain]
    params = [
        SamplingParams(seed=i, max_tokens=10 + 2 * i, n=1 + i % 3, stop=(stops[i],) if i % 4 else ()) for i in range(24)
    ]
    outputs = both_modes(smollm2_files, prompts, params, eos_rate=0.02)
    reasons = [(c.finish_reason, type(c.stop_reason)) for output in outputs for c in output.outputs]
    assert {(FinishReason.STOP, str), (FinishReason.STOP, type(None))} <= set(reasons)
    assert FinishReason.LENGTH in {reason for reason, _ in reasons}


def test_both_modes_say_the_same_under_preemption(smollm2_files: Files) -> None:
    prompts = ["A long shared beginning of every prompt, " * 3 + str(i) for i in range(12)]
    params = [SamplingParams(seed=i, max_tokens=40, stop=("q",)) for i in range(12)]
    both_modes(smollm2_files, prompts, params, num_kv_blocks=14)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_failing_step_ends_its_own_requests_and_leaves_nothing(
    smollm2_files: Files, failing: int, async_scheduling: bool
) -> None:
    """Who runs in it ends with its error; who waits is served, and so is the next call."""
    options = FakeOptions(failures={failing: InternalError("out of memory")})
    executor = TextExecutor(smollm2_files, options, 0.0, max_model_len=1024)
    with make(executor, async_scheduling=async_scheduling, max_num_seqs=2) as llm:
        params = [SamplingParams(seed=SEED, max_tokens=3 + i) for i in range(5)]
        outputs = llm.generate(["a", "b", "c", "d", "e"], params, use_tqdm=False)
        failed = [output.error is not None for output in outputs]
        assert 1 <= sum(failed) <= 2
        for output, asked in zip(outputs, params, strict=True):
            if output.error is None:
                said = executor.model.generate(output.prompt_token_ids, asked, asked.max_tokens or 0)
                assert output.outputs[0].token_ids == said
        again = llm.generate("a", params[0], use_tqdm=False)[0].outputs[0].token_ids
        assert again == executor.model.generate(llm.tokenizer.encode("a"), params[0], 3)
        assert executor.violations == [] and executor.used_slots == set()


class AlarmError(Exception):
    """What a program's own handler of a signal raises."""


@pytest.mark.parametrize("place", ["submit", "result", "update"])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("what", ["two Ctrl-C", "alarm"])
def test_a_signal_in_the_midst_of_a_step_leaves_the_engine_usable(
    smollm2_files: Files, place: str, is_async: bool, what: str
) -> None:
    """Between plan and hand-over, while the engine waits, behind a commit: the caller gets what the handler raises."""

    def on_alarm(number: int, frame: object) -> None:
        raise AlarmError

    previous = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGALRM, on_alarm)
    executor = TextExecutor(smollm2_files, FakeOptions(), 0.0, max_model_len=1024)
    try:
        with make(executor, async_scheduling=is_async) as llm:
            owner: Any = llm._core.engine.scheduler if place == "update" else llm._core.engine._link
            real, count = getattr(owner, place), itertools.count(1)

            def interrupted(*args: Any) -> Any:
                if next(count) == 5:
                    for number in [signal.SIGINT] * 2 if what == "two Ctrl-C" else [signal.SIGALRM]:
                        signal.raise_signal(number)
                return real(*args)

            setattr(owner, place, interrupted)
            with pytest.raises(KeyboardInterrupt if what == "two Ctrl-C" else AlarmError):
                llm.generate(["a", "b", "c"], SamplingParams(max_tokens=100), use_tqdm=False)
            params = SamplingParams(seed=SEED, max_tokens=5)
            (output,) = llm.generate("a", params, use_tqdm=False)
            assert output.outputs[0].token_ids == executor.model.generate(llm.tokenizer.encode("a"), params, 5)
            assert not llm._core.engine.scheduler.requests and not llm._core.engine.has_work()
            assert executor.used_slots == set() and executor.violations == []
    finally:
        signal.signal(signal.SIGINT, previous[0])
        signal.signal(signal.SIGALRM, previous[1])


class Timed(WorkerExecutor):
    """A real worker; keeps how long it had nothing to do before each full decode step."""

    idle_s: list[float]

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = super().submit(plan)
        if plan.num_rows == 8 == plan.total_num_scheduled_tokens:
            future.add_done_callback(lambda done: self.idle_s.append(done.result().timings.idle_ns / 1e9))
        return future


def test_the_worker_hardly_waits_between_steps() -> None:
    """From the step timings, at batch 8 with a real model. The least of three: a neighbour may take a processor."""
    executor = Timed(make_executor("cpu", 256 * 2**20)._worker)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, seed=1)
    found = []
    with LLM("smollm2", dtype="float32", executor=executor) as llm:
        for _ in range(3):
            executor.idle_s = []
            llm.generate([f"Number {i}" for i in range(8)], params, use_tqdm=False)
            assert len(executor.idle_s) > 40
            found.append(statistics.median(executor.idle_s))
    assert min(found) < MAX_IDLE_S
