"""`pagewire bench`: throughput, time to first token and inter-token latency of a running frontend."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.client import AsyncClient
from pagewire.client_trace import call_span, client_tracing
from pagewire.client_types import Prompt, RequestOptions
from pagewire.connection_flags import connection
from pagewire.errors import InvalidArgumentError, PagewireError, violation
from pagewire.generate import seconds, server_flag
from pagewire.sampling import SamplingParams

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer

FIRST_PLAIN_TOKEN = 256
"""Random prompts leave out the ids below, where vocabularies keep their special tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the workload."""

    prompt: Prompt
    max_tokens: int


@dataclass(slots=True)
class Measurement:
    """What one request showed: arrival times of messages in seconds since its start, tokens per message."""

    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    error: str = ""

    @property
    def inter_token_s(self) -> Iterator[float]:
        """Time per token after the first message; a message of k tokens counts as k equal steps."""
        for before, now, count in zip(self.arrivals_s, self.arrivals_s[1:], self.num_tokens[1:], strict=False):
            if count:
                yield from [(now - before) / count] * count


def positive(text: str) -> int:
    """The number of a flag that must be 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer, 1 or more, and is {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewire bench",
        description="Send a workload to a running frontend and print throughput and latency. Prompts are random token "
        "ids of the given length, or come from a file; answers are greedy and ignore the model's end.",
    )
    server_flag(parser)
    parser.add_argument("--num-prompts", type=positive, default=32, metavar="N", help="requests (default 32)")
    parser.add_argument("--concurrency", type=positive, default=8, metavar="N", help="requests at once (default 8)")
    parser.add_argument(
        "--prompt-len", type=positive, default=128, metavar="TOKENS", help="tokens per prompt (default 128)"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=64, metavar="TOKENS", help="tokens per answer (default 64)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    parser.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="JSON lines with prompt, prompt_token_ids or prompt_len, and max_tokens; replaces the flags above",
    )
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="SECONDS", help="per request (default 600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def read_workload(lines: Iterable[str], vocab_size: int, rng: random.Random) -> list[Job]:
    """The jobs of JSON lines. Raises InvalidArgumentError with the line's number."""
    jobs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = (
                row.get("prompt")
                or row.get("prompt_token_ids")
                or _random_prompt(int(row["prompt_len"]), vocab_size, rng)
            )
            jobs.append(Job(prompt, int(row["max_tokens"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            limit = "must be JSON with prompt, prompt_token_ids or prompt_len, and max_tokens"
            raise InvalidArgumentError([violation(f"line {number}", line.strip(), limit)]) from error
    return jobs


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError([violation("--workload", str(path), f"must be a text file ({error})")]) from error


def _random_prompt(length: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(min(FIRST_PLAIN_TOKEN, vocab_size - 1), vocab_size) for _ in range(length)]


async def measure(client: AsyncClient, job: Job, timeout_s: float, tracer: Tracer | None = None) -> Measurement:
    """Runs one request."""
    found = Measurement()
    started = time.perf_counter()
    try:
        with call_span(tracer, client.target, "Generate") as trace_context:
            options = RequestOptions(trace_context=trace_context)
            params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
            async for part in client.generate(job.prompt, params, options=options, timeout_s=timeout_s):
                found.arrivals_s.append(time.perf_counter() - started)
                found.num_tokens.append(sum(len(output.token_ids) for output in part.outputs))
                if part.usage is not None:
                    found.num_prompt_tokens = part.usage.prompt_tokens
    except PagewireError as error:
        found.error = f"{error.code}: {error.message}"
    return found


async def run(
    client: AsyncClient, jobs: Sequence[Job], concurrency: int, timeout_s: float, tracer: Tracer | None = None
) -> dict[str, Any]:
    """Runs all jobs, at most `concurrency` at once, and sums up."""
    gate = asyncio.Semaphore(concurrency)

    async def one(job: Job) -> Measurement:
        async with gate:
            return await measure(client, job, timeout_s, tracer)

    started = time.perf_counter()
    measurements = await asyncio.gather(*(one(job) for job in jobs))
    return summarize(measurements, time.perf_counter() - started)


def summarize(measurements: Sequence[Measurement], duration_s: float) -> dict[str, Any]:
    """Totals and percentiles; latencies in milliseconds."""
    good = [m for m in measurements if not m.error]
    num_output = sum(sum(m.num_tokens) for m in good)
    num_prompt = sum(m.num_prompt_tokens for m in good)
    errors = [m.error for m in measurements if m.error]
    return {
        "num_requests": len(measurements),
        "num_errors": len(errors),
        "first_errors": errors[:3],
        "duration_s": round(duration_s, 3),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "requests_per_s": round(len(good) / duration_s, 3),
        "output_tokens_per_s": round(num_output / duration_s, 2),
        "total_tokens_per_s": round((num_prompt + num_output) / duration_s, 2),
        "time_to_first_token_ms": percentiles(m.arrivals_s[0] for m in good if m.arrivals_s),
        "inter_token_ms": percentiles(gap for m in good for gap in m.inter_token_s),
        "request_ms": percentiles(m.arrivals_s[-1] for m in good if m.arrivals_s),
    }


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Milliseconds at p50, p90 and p99 (the nearest value that was measured); empty without any."""
    values = sorted(seconds)
    if not values:
        return {}
    return {f"p{p}": round(values[min(len(values) - 1, len(values) * p // 100)] * 1e3, 2) for p in (50, 90, 99)}


def _print_table(summary: dict[str, Any]) -> None:
    for key, value in summary.items():
        if isinstance(value, dict):
            value = "  ".join(f"{name} {number:g}" for name, number in value.items())
        elif isinstance(value, list):
            value = "; ".join(value)
        if value != "":
            print(f"{key:<24} {value}")


async def _main(arguments: argparse.Namespace, tracer: Tracer | None) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    async with AsyncClient(arguments.server, **connection(arguments)) as client:
        vocab_size = (await client.get_model(timeout_s=30)).info.vocab_size
        if arguments.workload is not None:
            jobs = read_workload(_lines(arguments.workload), vocab_size, rng)
        else:
            lengths = [arguments.prompt_len] * arguments.num_prompts
            jobs = [Job(_random_prompt(length, vocab_size, rng), arguments.max_tokens) for length in lengths]
        return await run(client, jobs, arguments.concurrency, arguments.timeout, tracer)


def main(argv: Sequence[str]) -> int:
    """Runs the command; status 1 where the server is missing or any request failed."""
    arguments = _parser().parse_args(argv)
    try:
        with client_tracing() as tracer:
            summary = asyncio.run(_main(arguments, tracer))
    except (PagewireError, OSError) as error:
        print(f"pagewire bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(json.dumps(summary))
    else:
        _print_table(summary)
    return 1 if summary["num_errors"] else 0
