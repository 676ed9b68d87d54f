"""A real core that plans ahead, over a worker that launches ahead: output is that of the CPU's worker, step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from core_svc.config import EngineConfig
from core_svc.executor import CacheSpec, ModelSpec
from frontend_svc.inprocess import WorkerExecutor, start_core
from pagewire.engine import AbortReason, EngineRequest, StepOutputs
from pagewire.plan import StepPlan, StepResult
from pagewire.sampling import SamplingParams
from tests.core.core_support import FRONTEND, make_request
from worker_svc.device_steps import DeviceSteps
from worker_svc.worker import Worker

NUM_REQUESTS, ABORTED = 14, 3
SIZES = {
    "roomy": {"num_blocks": 300, "max_num_seqs": 16, "max_num_batched_tokens": 256},
    "a pool that preempts": {"num_blocks": 17, "max_num_seqs": 6, "max_num_batched_tokens": 256},
    "chunks": {"num_blocks": 300, "max_num_seqs": 5, "max_num_batched_tokens": 7},
}


class Ahead(WorkerExecutor):
    """Hands plans over as the gRPC server does."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        start, deliver = self._worker.start, self._compute.deliver
        return self._compute.submit(lambda: start(plan, on_prepared=deliver), delivers=True)


def requests(is_simple: bool) -> list[EngineRequest]:
    draw, found = random.Random(4), []
    kinds = [
        {}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20}, {"repetition_penalty": 1.3},
        {"logprobs": 2}, {"min_tokens": 4, "stop_token_ids": (5, 6, 7)},
    ]  # fmt: skip
    for i in range(NUM_REQUESTS):
        changes = {"temperature": 0.0, "seed": 1000 + i, **kinds[i % (3 if is_simple else len(kinds))]}
        params = SamplingParams(max_tokens=draw.randint(1, 20), **changes)
        prompt = [draw.randrange(3, 131) for _ in range(draw.randint(1, 30))]
        found.append(make_request(i, prompt, params))
    return found


def outputs(executor: WorkerExecutor, model: str, sizes: dict[str, int], wanted: Sequence[EngineRequest]) -> dict:
    """Tokens by request; one of them is aborted after a few steps, half of them come later."""
    found: dict[int, list[int]] = {request.request_id: [] for request in wanted}

    def publish(frontend: str, message: StepOutputs) -> None:
        start = 0
        for request_id, count in zip(message.request_ids.tolist(), message.num_tokens.tolist(), strict=True):
            found[request_id] += message.token_ids[start : start + count].tolist()
            start += count

    config = EngineConfig(
        block_size=4, async_scheduling=True, max_num_seqs=sizes["max_num_seqs"],
        max_num_batched_tokens=sizes["max_num_batched_tokens"],
    )  # fmt: skip
    spec = ModelSpec(model, dtype="float32", load_format="dummy")
    core = start_core(executor, spec, CacheSpec(block_size=4, **sizes), config, publish)
    engine, in_flight = core.engine, None
    engine.add(FRONTEND, wanted[::2])
    for step in range(2000):
        if step == 4:
            engine.add(FRONTEND, wanted[1::2])
        if step == 7:
            engine.abort(FRONTEND, [ABORTED], AbortReason.CLIENT)
        if step > 7 and not engine.has_work() and in_flight is None:
            break
        in_flight = engine.step_ahead(in_flight)
    else:
        raise AssertionError("no end")
    executor.shutdown()
    assert engine.scheduler.stats.num_preemptions > 0 or sizes != SIZES["a pool that preempts"]
    return found


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_simple", [True, False], ids=["tokens alone", "every wish"])
def test_output_is_that_of_the_cpu(tiny, sizes, is_simple, monkeypatch) -> None:
    wanted, overlapped = requests(is_simple), []
    expected = outputs(WorkerExecutor(Worker(num_threads=1)), tiny, sizes, wanted)
    monkeypatch.setattr("worker_svc.runner.is_interpreting", lambda: True)
    launch = DeviceSteps.launch

    def counted(self: DeviceSteps, *args: object) -> object:
        overlapped.append(self._before is not None)
        return launch(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceSteps, "launch", counted)
    got = outputs(Ahead(Worker(num_threads=1)), tiny, sizes, wanted)
    for request in wanted:
        mine, others = got[request.request_id], expected[request.request_id]
        if request.request_id == ABORTED:  # how many came before it ended is a matter of time
            assert mine[: len(others)] == others[: len(mine)]
        else:
            assert mine == others and len(mine) > 0, request.request_id
    assert sum(overlapped) >= (10 if is_simple else 1), "steps were launched ahead"
