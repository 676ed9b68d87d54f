"""Times the scheduler alone: schedule and update per running request and step, in steady decode.

    python bench/scheduler.py [--running 64 256 1024] [--steps 200] [--repeats 5] [--json]

The worker is the fake one in its cheap mode (every row samples one constant token, nothing is checked), so that what
is measured is the core's own work. Median and range are over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np

from core_svc.config import EngineConfig
from core_svc.engine import EngineCore
from core_svc.executor import ModelSpec
from core_svc.fake_executor import FakeExecutor, FakeOptions
from pagewire.engine import EngineRequest, StepOutputs
from pagewire.sampling import SamplingParams

PROMPT_TOKENS = 64
BLOCK_SIZE = 16
WARM_UP_STEPS = 20


def make_engine(num_running: int, num_steps: int) -> EngineCore:
    """An engine whose requests all decode, for at least num_steps more steps."""
    max_tokens = num_steps + WARM_UP_STEPS + 8
    blocks_per_request = -(-(PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_TOKENS,
        max_num_requests=num_running,
    )
    executor = FakeExecutor(
        1 + num_running * blocks_per_request,
        max_num_seqs=num_running,
        max_num_batched_tokens=config.max_num_batched_tokens,
        options=FakeOptions(is_checking=False),
    )

    def publish(frontend: str, outputs: StepOutputs) -> None:
        pass

    engine = EngineCore(executor, executor.load_model(ModelSpec()), executor.cache, config, publish)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [
        EngineRequest(i, rng.integers(10, 40_000, PROMPT_TOKENS, dtype=np.int32), sampling) for i in range(num_running)
    ]
    engine.add("bench", requests)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    assert len(engine.scheduler.running) == num_running
    return engine


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Microseconds per running request and step, by part of the step."""
    engine = make_engine(num_running, num_steps)
    before = engine.stats()
    started = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall_s = time.perf_counter() - started
    after = engine.stats()
    assert len(engine.scheduler.running) == num_running, "steady decode"
    scale = 1e6 / (num_running * num_steps)
    schedule_us = (after.schedule_s - before.schedule_s) * scale
    update_us = (after.update_s - before.update_s) * scale
    return {
        "schedule_us": schedule_us,
        "update_us": update_us,
        "scheduler_us": schedule_us + update_us,
        "publish_us": (after.publish_s - before.publish_s) * scale,
        "step_us": wall_s * scale,
    }


def main() -> int:
    """Prints a line per number of running requests."""
    parser = argparse.ArgumentParser(
        description="Time schedule and update per running request and step, with a fake worker."
    )
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=200, help="steps per repeat (default 200)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats (default 5)")
    parser.add_argument("--json", action="store_true", help="a JSON line per figure: name, unit, values")
    arguments = parser.parse_args()
    for num_running in arguments.running:
        repeats = [measure(num_running, arguments.steps) for _ in range(arguments.repeats)]
        row: dict[str, float | int | list[float]] = {"running": num_running}
        for name in repeats[0]:
            values = [repeat[name] for repeat in repeats]
            row[name] = round(statistics.median(values), 3)
            row[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)]
        if arguments.json:
            figure = f"scheduler, schedule + update per running request and step, {num_running} running"
            values = [round(repeat["scheduler_us"], 3) for repeat in repeats]
            print(json.dumps({"name": figure, "unit": "us", "values": values}), flush=True)
        else:
            print(
                f"{num_running:5d} running: {row['scheduler_us']} us per request and step {row['scheduler_us_range']} "
                f"(schedule {row['schedule_us']}, update {row['update_us']}, publish {row['publish_us']}, "
                f"whole step {row['step_us']})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
