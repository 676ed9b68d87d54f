"""What traces cost a core: its own work per step with no observer, with 1 % and with 100 % of the requests sampled.

    python -m bench.tracing [--running 64] [--steps 300] [--repeats 7] [--json]

The engine of bench/scheduler.py with its mixed load (requests come and go) over the fake worker in its cheap mode. CPU
time is counted, of the engine's thread (median over groups of steps) and of the others, which encode and send spans.
Each side is a process, and so is the sink; they take turns group by group, as the machine's speed drifts. What a share
of throughput is depends on the length of a step: `--step-ms` (default 10) says for what length the share is told.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

from bench.process_group import ROOT
from bench.scheduler import WARM_UP_STEPS, Load
from bench.trace_sink import TraceSink
from core_svc.trace_observer import TraceObserver
from pagewire.engine import TraceContext
from pagewire.runtime.tracing import start_tracing

SIDES = {"off": None, "1 %": 0.01, "100 %": 1.0}
GROUP = 25


class TracedLoad(Load):
    """The load, watched by a tracer; a share of the requests comes with a sampled parent. None: not watched."""

    def __init__(self, num_running: int, num_steps: int, ratio: float | None) -> None:
        self.ratio = ratio
        self.parents = random.Random(0)
        super().__init__(num_running, num_steps, is_mixed=True, is_sync=False)
        if ratio is None:
            return
        tracer = start_tracing("core", "bench")
        assert tracer is not None
        observer = TraceObserver(tracer)
        observer.watch(self.engine.scheduler)
        self.engine._observers = [observer]
        self.engine.scheduler.journal.is_on = True
        # Until every request that runs has come under the observer's eyes.
        for _ in range(4 * WARM_UP_STEPS):
            self.step()

    def trace_context(self) -> TraceContext | None:
        """As a frontend sends it: of every request, and sampled or not."""
        if self.ratio is None:
            return None
        flags = "01" if self.parents.random() < self.ratio else "00"
        return TraceContext(
            f"00-{self.parents.getrandbits(128) | 1:032x}-{self.parents.getrandbits(64) | 1:016x}-{flags}"
        )


def serve_side(num_running: int, num_steps: int, ratio: float | None) -> None:
    """A side as a process: runs as many steps as each line of its input says, and answers with its CPU seconds."""
    load = TracedLoad(num_running, num_steps, ratio)
    print(time.thread_time(), time.process_time(), flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            load.step()
        print(time.thread_time(), time.process_time(), flush=True)


class Side:
    """Such a process."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "bench.tracing", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def step(self, count: int) -> tuple[float, float]:
        """CPU seconds of its whole life by then, of the engine's thread and of all."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> tuple[float, float]:
        assert self._process.stdout is not None
        thread_s, process_s = map(float, self._process.stdout.readline().split())
        return thread_s, process_s

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def measure(num_running: int, num_steps: int, repeats: int) -> dict[str, list[float]]:
    """CPU microseconds per step, by side, a value per repeat."""
    numbers = [f"--running={num_running}", f"--steps={num_steps * repeats}"]
    sides = {name: Side([f"--side={name}", *numbers]) for name in SIDES}
    found: dict[str, list[float]] = {name: [] for name in sides}
    num_groups = num_steps // GROUP
    try:
        for _ in range(repeats):
            first = {name: side.step(0) for name, side in sides.items()}
            last = dict(first)
            engine: dict[str, list[float]] = {name: [] for name in sides}
            for group in range(num_groups):
                for name in sides if group % 2 == 0 else reversed(sides):
                    now = sides[name].step(GROUP)
                    engine[name].append(now[0] - last[name][0])
                    last[name] = now
            for name in sides:
                of_others = (last[name][1] - first[name][1]) - (last[name][0] - first[name][0])
                found[name].append((statistics.median(engine[name]) + of_others / num_groups) / GROUP * 1e6)
    finally:
        for side in sides.values():
            side.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64, help="running requests (default 64)")
    parser.add_argument("--steps", type=int, default=300, help="steps per repeat and side (default 300)")
    parser.add_argument("--repeats", type=int, default=7, help="repeats (default 7)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a step for the share (default 10)")
    parser.add_argument("--json", action="store_true", help="a JSON line per figure: name, unit, values")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve_side(arguments.running, arguments.steps, SIDES[arguments.side])
        return 0
    sink = TraceSink()
    try:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = sink.endpoint
        found = measure(arguments.running, arguments.steps, arguments.repeats)
    finally:
        sink.close()
    for name, values in found.items():
        what = f"core, CPU per step at {arguments.running} running, traces {name}"
        if arguments.json:
            print(json.dumps({"name": what, "unit": "us", "values": [round(v, 1) for v in values]}), flush=True)
            continue
        more = [value - off for value, off in zip(values, found["off"], strict=True)]
        share = statistics.median(more) / (arguments.step_ms * 1e3)
        print(
            f"{what}: {statistics.median(values):.0f} us [{min(values):.0f} to {max(values):.0f}], "
            f"{statistics.median(more):+.0f} us, {share:+.2%} of a step of {arguments.step_ms:g} ms",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
