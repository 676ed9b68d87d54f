"""What is measured: one function per section. Each adds its figures, and a failure of one side is a row of its own."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench.clients import Load
from bench.context import Context
from bench.deployments import TRACE_RATIOS
from bench.process_group import ROOT
from bench.sides import Run
from bench.statistic import percentile
from bench.workloads import STEP_LONG, STEP_SHORT, Workload, decode_steps, load

NUM_CLIENTS = 16
STEP_BATCHES = (1, 2, 4, 8, 32, 64)


def single(context: Context) -> None:
    """One stream: decode rate from the difference of a long and a short answer; served too, from the messages."""
    workload = load("single_stream")
    names = ["pagewire", "pagewire-int8", "pagewire-q4_1", "pagewire-q8_0", "vllm", "llama-bf16", "llama-q4_1"]
    names = context.wanted(names)
    context.warm_up(names, workload)
    passes = context.passes({name: _decode_rate(context, name, workload) for name in names}, context.repeats + 2)
    what = f"{workload}, decode"
    context.report("single", what, "tok/s", passes.results, passes.errors)
    pairs = [
        ("pagewire", "vllm"),
        ("pagewire", "llama-bf16"),
        ("pagewire-q4_1", "llama-q4_1"),
        ("pagewire-int8", "vllm"),
    ]
    context.compare("single", what, pairs, passes.results)


def _decode_rate(context: Context, name: str, workload: Workload) -> Callable[[], float]:
    def measure() -> float:
        side = context.offline(name)
        first = side.run(workload.with_max_tokens(1)).seconds
        return (workload.max_tokens[0] - 1) / (side.run(workload).seconds - first)

    return measure


def steps(context: Context) -> None:
    """Decode steps: the time of many equal steps more, divided by their number."""
    names = context.wanted(["pagewire", "pagewire-int8", "vllm", "llama-bf16"])
    for batch in STEP_BATCHES:
        short, long = decode_steps(batch)
        if batch == STEP_BATCHES[0]:
            context.warm_up(names, short)

        def step_ms(name: str, short: Workload = short, long: Workload = long) -> Callable[[], float]:
            def measure() -> float:
                side = context.offline(name)
                first = side.run(short).seconds
                return (side.run(long).seconds - first) / (STEP_LONG - STEP_SHORT) * 1e3

            return measure

        passes = context.passes({name: step_ms(name) for name in names})
        what = f"decode step at batch {batch}"
        context.report(f"steps/{batch}", what, "ms", passes.results, passes.errors)
        pairs = [("pagewire", "vllm"), ("pagewire", "llama-bf16")]
        context.compare(f"steps/{batch}", what, pairs, passes.results, is_time=True)


def batch(context: Context) -> None:
    """Many prompts at once: in one process, through three, quantized, and the peers. llama.cpp has one pass."""
    pairs = [
        ("pagewire", "vllm"),
        ("pagewire-int8", "vllm"),
        ("pagewire-served", "pagewire"),
        ("pagewire-served", "vllm"),
    ]
    _throughput(context, "batch", ["pagewire", "pagewire-served", "pagewire-int8", "vllm"], pairs)
    names = context.wanted(["llama-bf16"])
    workload = load("batch", context.limit)
    passes = context.passes({name: _run(context, name, workload) for name in names}, 1)
    rates = {name: [run.tokens_per_s for run in runs] for name, runs in passes.results.items()}
    context.report("batch", str(workload), "tok/s", rates, passes.errors)


def shared(context: Context) -> None:
    """Prompts with a common beginning."""
    pairs = [("pagewire", "vllm"), ("pagewire-int8", "vllm"), ("pagewire-served", "pagewire")]
    names = ["pagewire", "pagewire-served", "pagewire-int8", "vllm", "llama-bf16"]
    _throughput(context, "shared", names, pairs, "shared_prefix")


def _throughput(
    context: Context, section: str, names: Sequence[str], pairs: Sequence[tuple[str, str]], file: str = ""
) -> None:
    workload = load(file or section, context.limit)
    names = context.wanted(names)
    context.warm_up(names, workload)
    passes = context.passes({name: _run(context, name, workload) for name in names})
    rates = {name: [run.tokens_per_s for run in runs] for name, runs in passes.results.items()}
    context.report(section, str(workload), "tok/s", rates, passes.errors)
    context.compare(section, str(workload), pairs, rates)


def _run(context: Context, name: str, workload: Workload) -> Callable[[], Run | Load]:
    if name.endswith("-served"):
        return lambda: context.served(name).load(workload, len(workload.prompts))
    return lambda: context.offline(name).run(workload)


def clients(context: Context) -> None:
    """Streaming clients in a closed loop against the servers: throughput and latencies. Memory is read after it."""
    workload = load("batch", context.limit)
    names = context.wanted(["pagewire-served", "pagewire-served-256", "vllm-served"])
    context.warm_up(names, workload)
    passes = context.passes(
        {name: (lambda name=name: context.served(name).load(workload, NUM_CLIENTS)) for name in names}
    )
    what, pairs = f"{NUM_CLIENTS} clients", [("pagewire-served", "vllm-served"), ("pagewire-served-256", "vllm-served")]
    measures: dict[str, tuple[str, str, Callable[[Load], float]]] = {
        "throughput": ("throughput", "tok/s", lambda seen: seen.tokens_per_s),
        "ttft_p50": ("TTFT p50", "ms", lambda seen: 1e3 * percentile(seen.ttft_s, 0.5)),
        "ttft_p99": ("TTFT p99", "ms", lambda seen: 1e3 * percentile(seen.ttft_s, 0.99)),
        "itl_p50": ("ITL p50", "ms", lambda seen: 1e3 * percentile(seen.gaps_s, 0.5)),
        "itl_p99": ("ITL p99", "ms", lambda seen: 1e3 * percentile(seen.gaps_s, 0.99)),
    }
    for key, (title, unit, of) in measures.items():
        values = {name: [of(seen) for seen in loads] for name, loads in passes.results.items()}
        context.report(f"clients/{key}", f"{what}, {title}", unit, values, passes.errors)
        context.compare(f"clients/{key}", f"{what}, {title}", pairs, values)


def tracing(context: Context) -> None:
    """What traces cost: bench/tracing.py for a core, and served throughput with none, 1 % and all requests traced."""
    for figure in _script(context, "tracing", "-m", "bench.tracing", "--json"):
        name, values = str(figure["name"]), figure["values"]
        context.recorder.add(f"tracing/{name.partition('traces ')[2]}", name, str(figure["unit"]), values)
    names = ["pagewire-served", *TRACE_RATIOS]
    workload = load("batch", context.limit)
    context.warm_up(names, workload)
    runs = {name: (lambda name=name: context.served(name).load(workload, NUM_CLIENTS)) for name in names}
    passes = context.passes(runs, context.repeats + 2)
    rates = {name: [seen.tokens_per_s for seen in loads] for name, loads in passes.results.items()}
    what = f"{NUM_CLIENTS} clients, traces"
    context.report("tracing", what, "tok/s", rates, passes.errors)
    context.compare("tracing", what, [(name, "pagewire-served") for name in TRACE_RATIOS], rates)


def wire(context: Context) -> None:
    """What the split into processes costs one stream: time between tokens, served less in one process."""
    workload = load("single_stream")
    names = ["pagewire", "pagewire-served"]
    context.warm_up(names, workload)
    rate = _decode_rate(context, "pagewire", workload)
    served_ms: list[float] = []

    def served() -> float:
        seen = context.served("pagewire-served").load(workload, 1)
        served_ms.append(1e3 * percentile(seen.gaps_s, 0.5))
        return served_ms[-1]

    passes = context.passes({"pagewire": lambda: 1e3 / rate(), "pagewire-served": served}, context.repeats + 2)
    context.report("wire/itl", "one stream, time per token (served: ITL p50)", "ms", passes.results, passes.errors)
    differences = [b - a for a, b in zip(*passes.results.values(), strict=False)]
    key, name = "single/itl_p50/pagewire-served-pagewire", "one stream, ITL p50: three processes less one process"
    if differences:
        context.recorder.add(key, name, "ms", differences)
    else:
        context.recorder.fail(key, name, "; ".join(passes.errors.values()))


def memory(context: Context) -> None:
    """Memory of all processes of a served side after the batch workload."""
    workload = load("batch", context.limit)
    values: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for name in context.wanted(["pagewire-served", "vllm-served"]):
        values[name] = []
        try:
            group = context.served(name)
            context.awake(name, lambda group=group: group.load(workload, NUM_CLIENTS))
            values[name].append(group.resident_bytes() / 2**20)
        except Exception as error:  # it becomes the row's text
            errors[name] = str(error)
    context.report("memory", "memory of all processes, KV pool of 1 GiB", "MiB", values, errors)
    context.compare("memory", "memory of all processes", [("pagewire-served", "vllm-served")], values)


def cold(context: Context) -> None:
    """From the command to the first answer, with everything installed and cached: starts served sides anew."""
    values: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for name in context.wanted(["pagewire-served", "vllm-served"]):
        values[name] = []
        try:
            for _ in range(context.repeats if name == "pagewire-served" else 1):
                context.close_served(name)
                values[name].append(context.served(name).start_s)
        except Exception as error:  # it becomes the row's text
            errors[name] = str(error)
    context.report("cold", "command to first answer", "s", values, errors)


def scheduler(context: Context) -> None:
    """bench/scheduler.py; the dearest load at each number of requests is what the bar is about."""
    dearest: dict[str, list[float]] = {}
    for figure in _script(context, "scheduler", "bench/scheduler.py", "--json"):
        name, values = str(figure["name"]), figure["values"]
        context.recorder.add(f"scheduler/{name.partition(', ')[2]}", name, str(figure["unit"]), values)
        found = re.search(r"(\d+) running", name)
        count = found.group(1) if found else ""
        dearest[count] = max(dearest.get(count, [0.0]), values, key=statistics.median)
    for count, values in dearest.items():
        name = f"scheduler per running request and step at {count}, dearest load"
        context.recorder.add(f"scheduler/{count}", name, "us", values)


def frontend(context: Context) -> None:
    """bench/frontend.py: a frontend process between a core and a client, and its work on text alone."""
    dearest: dict[str, list[float]] = {"cpu": [0.0], "detokenize": [0.0]}
    for figure in _script(context, "frontend", "bench/frontend.py", "--json"):
        name, values = str(figure["name"]), figure["values"]
        context.recorder.add(f"frontend/{name.partition('token, ')[2]}", name, str(figure["unit"]), values)
        if "gRPC write" in name:
            dearest["cpu"] = max(dearest["cpu"], values, key=statistics.median)
        elif "text alone" in name and "with message" not in name:
            dearest["detokenize"] = max(dearest["detokenize"], values, key=statistics.median)
    for key, title in (("cpu", "CPU per token with the gRPC write"), ("detokenize", "detokenizing and stop search")):
        if dearest[key] != [0.0]:
            context.recorder.add(f"frontend/{key}", f"frontend, {title}, dearest case", "us", dearest[key])


def perplexity(context: Context) -> None:
    """Perplexity of the committed text, by weights."""
    windows = load("perplexity").prompts
    values: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for name in ["pagewire", "pagewire-int8", "pagewire-q4_1", "pagewire-q8_0"]:
        values[name] = []
        try:
            values[name].append(context.offline(name).perplexity(windows))
        except Exception as error:  # it becomes the row's text
            errors[name] = str(error)
    context.report("perplexity", "perplexity of bench/workloads/perplexity.txt", "", values, errors)


def _script(context: Context, key: str, *command: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=540)
    if done.returncode:
        context.recorder.fail(key, command[-2], done.stderr.strip().rpartition("\n")[2])
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


SECTIONS: dict[str, Callable[[Context], None]] = {
    section.__name__: section
    for section in (single, steps, batch, shared, clients, wire, memory, cold, scheduler, tracing, frontend, perplexity)
}
