"""Times the scheduler alone: schedule and update per running request and step.

    python bench/scheduler.py [--running 64 256 1024] [--steps 200] [--repeats 5] [--metrics] [--json]

Prefix cache, priority policy, stats and KV events are on, and steps overlap (the next is planned before the one before
it is committed) unless --sync says otherwise. The worker is the fake one in its cheap mode (every row samples one
constant token, nothing is checked), so that what is measured is the core's own work. Two loads:

- steady: every request decodes in every step, fills a block of 16 tokens every 16 steps, none comes or goes;
- mixed: outputs of 64 to 192 tokens over prompts of 64 (half of each prompt shared), and for each request that ends
  another one is added: receiving, admitting and ending requests is part of the figure.

Median and range are over the repeats. With --metrics every repeat is one run without and one with the observer that
counts for /metrics, in turns, and the figure is the whole step's processor time.
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
from core_svc.executor_link import InFlight
from core_svc.fake_executor import FakeExecutor, FakeOptions
from core_svc.kv_event_log import KvEventLog
from core_svc.metrics import EngineMetrics
from pagewire.engine import EngineRequest, StepOutputs, TraceContext
from pagewire.runtime.instruments import Instruments
from pagewire.sampling import SamplingParams

PROMPT_TOKENS = 64
BLOCK_SIZE = 16
WARM_UP_STEPS = 40
MIXED_OUTPUTS = (64, 192)


class Load:
    """An engine that runs num_running requests, and whoever replaces those that end."""

    def __init__(
        self, num_running: int, num_steps: int, *, is_mixed: bool, is_sync: bool, has_metrics: bool = False
    ) -> None:
        self.num_running, self.is_mixed, self.is_sync = num_running, is_mixed, is_sync
        self.steady_tokens = num_steps + WARM_UP_STEPS + 16
        longest = MIXED_OUTPUTS[1] if is_mixed else self.steady_tokens
        blocks_per_request = -(-(PROMPT_TOKENS + longest) // BLOCK_SIZE)
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(2048, num_running * 2),
            max_num_requests=2 * num_running,
            policy="priority",
        )
        executor = FakeExecutor(
            1 + num_running * blocks_per_request,
            max_num_seqs=num_running,
            max_num_batched_tokens=config.max_num_batched_tokens,
            options=FakeOptions(is_checking=False),
        )
        self.rng = np.random.default_rng(0)
        self.shared = self.rng.integers(10, 40_000, PROMPT_TOKENS // 2, dtype=np.int32)
        self.num_added = self.num_ended = 0
        self.in_flight: InFlight | None = None
        model = executor.load_model(ModelSpec())
        log = KvEventLog()
        observers = [EngineMetrics(Instruments())] if has_metrics else []
        self.engine = EngineCore(
            executor, model, executor.cache, config, self.publish, on_kv_events=log.append, observers=observers
        )
        self.add(num_running)
        for _ in range(WARM_UP_STEPS):
            self.step()
        assert self.engine.stats().num_running == num_running

    def publish(self, frontend: str, outputs: StepOutputs) -> None:
        """A frontend that reads nothing but ends."""
        self.num_ended += len(outputs.finished)

    def add(self, count: int) -> None:
        """Adds requests."""
        requests = []
        for _ in range(count):
            max_tokens = int(self.rng.integers(*MIXED_OUTPUTS)) if self.is_mixed else self.steady_tokens
            own = self.rng.integers(10, 40_000, PROMPT_TOKENS // 2, dtype=np.int32)
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            requests.append(
                EngineRequest(
                    self.num_added,
                    np.concatenate([self.shared, own]),
                    sampling,
                    eos_token_ids=(2,),
                    arrival_time_ns=self.num_added,
                    trace_context=self.trace_context(),
                )
            )
            self.num_added += 1
        self.engine.add("bench", requests)

    def trace_context(self) -> TraceContext | None:
        """Of the next request."""
        return None

    def step(self) -> None:
        """One step, after the requests that replace those that ended."""
        if self.num_ended:
            count, self.num_ended = self.num_ended, 0
            self.add(count)
        if self.is_sync:
            self.engine.step()
        else:
            self.in_flight = self.engine.step_ahead(self.in_flight)


def measure(
    num_running: int, num_steps: int, *, is_mixed: bool, is_sync: bool, has_metrics: bool = False
) -> dict[str, float]:
    """Microseconds per running request and step, by part of the step; the whole step counts the fake worker too."""
    load = Load(num_running, num_steps, is_mixed=is_mixed, is_sync=is_sync, has_metrics=has_metrics)
    before, num_rows = load.engine.stats(), 0
    started, started_cpu = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        load.step()
        num_rows += load.engine.stats().num_running
    wall_s, cpu_s = time.perf_counter() - started, time.thread_time() - started_cpu
    after = load.engine.stats()
    assert num_rows > 0.95 * num_running * num_steps, "the load keeps its requests running"
    scale = 1e6 / num_rows
    schedule_us = (after.schedule_s - before.schedule_s) * scale
    update_us = (after.update_s - before.update_s) * scale
    return {
        "schedule_us": schedule_us,
        "update_us": update_us,
        "scheduler_us": schedule_us + update_us,
        "publish_us": (after.publish_s - before.publish_s) * scale,
        "step_us": wall_s * scale,
        "step_cpu_us": cpu_s * scale,
        "step_cpu_ms": 1e3 * cpu_s / num_steps,
    }


def compare_metrics(num_running: int, num_steps: int, repeats: int, *, is_mixed: bool, is_sync: bool) -> str:
    """Processor milliseconds of a whole step without and with metrics, in turns, and the medians' difference."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for has_metrics in (False, True):
            row = measure(num_running, num_steps, is_mixed=is_mixed, is_sync=is_sync, has_metrics=has_metrics)
            found[has_metrics].append(row["step_cpu_ms"])
    without, with_metrics = (statistics.median(found[has_metrics]) for has_metrics in (False, True))
    return (
        f"{without:.3f} ms a step without ({min(found[False]):.3f} to {max(found[False]):.3f}), "
        f"{with_metrics:.3f} ms with ({min(found[True]):.3f} to {max(found[True]):.3f}): "
        f"{1e3 * (with_metrics - without):+.1f} us"
    )


def main() -> int:
    """Prints a line per load and number of running requests."""
    parser = argparse.ArgumentParser(
        description="Time schedule and update per running request and step, with a fake worker."
    )
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=200, help="steps per repeat (default 200)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats (default 5)")
    parser.add_argument("--sync", action="store_true", help="commit each step before the next one is planned")
    parser.add_argument("--metrics", action="store_true", help="runs without and with metrics, in turns")
    parser.add_argument("--json", action="store_true", help="a JSON line per figure: name, unit, values")
    arguments = parser.parse_args()
    for load, num_running in [(load, n) for load in ("steady", "mixed") for n in arguments.running]:
        is_mixed = load == "mixed"
        if arguments.metrics:
            sizes = num_running, arguments.steps, arguments.repeats
            text = compare_metrics(*sizes, is_mixed=is_mixed, is_sync=arguments.sync)
            print(f"{load} {num_running:5d} running: {text}", flush=True)
            continue
        repeats = [
            measure(num_running, arguments.steps, is_mixed=is_mixed, is_sync=arguments.sync)
            for _ in range(arguments.repeats)
        ]
        row: dict[str, float | list[float]] = {}
        for name in repeats[0]:
            values = [repeat[name] for repeat in repeats]
            row[name] = round(statistics.median(values), 3)
            row[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)]
        if arguments.json:
            figure = f"scheduler, schedule + update per running request and step, {num_running} running, {load}"
            values = [round(repeat["scheduler_us"], 3) for repeat in repeats]
            print(json.dumps({"name": figure, "unit": "us", "values": values}), flush=True)
        else:
            print(
                f"{load} {num_running:5d} running: {row['scheduler_us']} us per request and step "
                f"{row['scheduler_us_range']} (schedule {row['schedule_us']}, update {row['update_us']}, "
                f"publish {row['publish_us']}, whole step {row['step_us']})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
