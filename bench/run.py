"""`make bench`: one command, one table.

Every figure is a median over repeats with its range; ratios are taken pair by pair within a repeat, so that they hold
where the machine's speed drifts. `--write` puts the table into BENCHMARKS.md, replacing the one before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runners import InprocessRunner, Run, ServedRunner
from workload import Workload, load

HERE = Path(__file__).parent
MARKS = ("<!-- bench: begin -->", "<!-- bench: end -->")
SECTIONS = ("offline", "wire", "scheduler", "frontend")


class Table:
    """Rows of name, unit, median, range."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []

    def add(self, name: str, unit: str, values: Sequence[float]) -> None:
        digits = 3 if max(values) < 10 else 1
        row = (
            name,
            unit,
            f"{statistics.median(values):.{digits}f}",
            f"{min(values):.{digits}f}-{max(values):.{digits}f} of {len(values)}",
        )
        self.rows.append(row)
        print(f"{name:<64} {row[2]:>9} {unit:<8} ({row[3]})", flush=True)

    def markdown(self) -> str:
        lines = ["| figure | median | unit | range |", "|---|---:|---|---:|"]
        lines += [f"| {name} | {median} | {unit} | {spread} |" for name, unit, median, spread in self.rows]
        return "\n".join(lines)


def describe(workload: Workload) -> str:
    return (
        f"{workload.name} ({len(workload.prompts)} requests, {workload.num_prompt_tokens} + "
        f"{workload.num_output_tokens} tokens)"
    )


def bench_model(table: Table, args: argparse.Namespace) -> None:
    """Offline throughput, and the same through three processes, alternating."""
    inprocess = InprocessRunner(args.model, args.dtype, args.kv_cache_memory)
    served = ServedRunner(args.model, args.dtype, args.kv_cache_memory) if "wire" in args.only else None
    try:
        for name in ("single_stream", "shared_prefix", "batch"):
            workload = load(name, args.limit)
            runners = [inprocess.run] + ([served.run] if served else [])
            runs = _alternate(runners, workload, args.repeats, args.max_seconds)
            _report(table, workload, runs)
    finally:
        inprocess.close()
        if served is not None:
            served.close()


def _alternate(
    runners: list[Callable[[Workload], Run]], workload: Workload, repeats: int, max_seconds: float
) -> list[list[Run]]:
    """Runs per runner; each repeat runs all of them in turn, and none starts after max_seconds. A short pass of each
    comes first and is not counted.
    """
    warm_up = Workload(workload.name, workload.prompts[:4], [min(n, 8) for n in workload.max_tokens[:4]])
    for run in runners:
        run(warm_up)
    found: list[list[Run]] = [[] for _ in runners]
    started = time.monotonic()
    for repeat in range(repeats):
        if repeat and time.monotonic() - started > max_seconds:
            break
        for place, run in enumerate(runners):
            found[place].append(run(workload))
            assert found[place][-1].num_output_tokens == workload.num_output_tokens
    return found


def _report(table: Table, workload: Workload, runs: list[list[Run]]) -> None:
    what = describe(workload)
    table.add(f"{what}: in one process", "tok/s", [run.tokens_per_s for run in runs[0]])
    if len(runs) < 2:
        return
    table.add(f"{what}: three processes", "tok/s", [run.tokens_per_s for run in runs[1]])
    ratios = [served.seconds / alone.seconds for alone, served in zip(*runs, strict=True)]
    table.add(f"{what}: wire tax, time of three processes / of one", "x", ratios)
    table.add(f"{what}: time to first token, median", "ms", [1e3 * statistics.median(run.ttft_s) for run in runs[1]])
    table.add(f"{what}: time per output token, median", "ms", [1e3 * statistics.median(run.tpot_s) for run in runs[1]])


def bench_script(table: Table, script: str) -> None:
    """Figures of a script of its own that prints JSON lines of name, unit and values."""
    command = [sys.executable, str(HERE / script), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        figure = json.loads(line)
        table.add(figure["name"], figure["unit"], figure["values"])


def write(table: Table, path: Path, command: str) -> None:
    """Replaces the marked part of the file."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    head = (
        f"Date: {datetime.date.today().isoformat()}. Machine: {cpu.group(1) if cpu else platform.processor()}, "
        f"{_num_cpus()} virtual cores (shared), Python {platform.python_version()}, torch {_torch_version()}.\n"
        f"Command: `{command}`.\n"
    )
    text = path.read_text()
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    path.write_text(f"{before}{MARKS[0]}\n{head}\n{table.markdown()}\n{MARKS[1]}{after}")


def _num_cpus() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model to run (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="type of weights and activations (default: %(default)s)")
    parser.add_argument("--kv-cache-memory", type=int, default=2**30, help="KV pool in bytes (default: 1 GiB)")
    parser.add_argument("--repeats", type=int, default=3, help="counted passes (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, default=900, help="no repeat of a workload starts later (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, help="only the first so many requests of each workload")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated (default: all)")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced, such as BENCHMARKS.md")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(SECTIONS):
        parser.error(f"--only knows {', '.join(SECTIONS)}; not {', '.join(sorted(unknown))}")
    table = Table()
    if {"offline", "wire"} & set(args.only):
        bench_model(table, args)
    for section in ("scheduler", "frontend"):
        if section in args.only:
            bench_script(table, f"{section}.py")
    if args.write:
        write(table, args.write, "python bench/run.py " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
