"""A frontend as a process of its own between a core without a model and one client: CPU time per streamed token.

The core is the real one, over an executor that says a fixed text at a fixed pace; the client reads raw messages, so
that it takes little of the machine. CPU time is the kernel's count for the frontend's process, all threads together.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio
import numpy as np
import psutil

from pagewire.runtime.ready import parse_ready, print_ready
from pagewire.runtime.transport import channel_options
from pagewire.v1 import frontend_pb2, types_pb2

START_TIMEOUT_S = 120
TEXT = (
    "The scheduler decides, once per step, how many tokens of each request are computed. "
    "日本語も少し、そして emoji 👍🏽. "
    "def step(self) -> bool:\n    return self.receive() or self.schedule()\n"
)


def load_tokenizer_files(model: str) -> dict[str, bytes]:
    """The tokenizer that the worker exports for a model."""
    from worker_svc.models.sources import locate
    from worker_svc.models.tokenizer_files import export_tokenizer, load_tokenizer

    return export_tokenizer(load_tokenizer(locate(model)))


# --- the core's process ---


async def serve_core(files: Mapping[str, bytes], step_s: float) -> None:
    """A core whose steps take `step_s` seconds and give every request the next token of TEXT."""
    from core_svc.config import EngineConfig
    from core_svc.execute_client import Progress
    from core_svc.executor import CacheSpec, ModelSpec
    from core_svc.fake_executor import FakeExecutor, FakeOptions
    from core_svc.fake_model import FakeModel
    from core_svc.kv_event_log import KvEventLog
    from core_svc.output_hub import OutputHub
    from core_svc.server import SERVICE_NAME, EngineCoreServicer, Serving
    from frontend_svc.inprocess import start_core
    from frontend_svc.tokenizer import Tokenizer
    from pagewire.engine import ModelInfo
    from pagewire.plan import StepPlan, StepResult
    from pagewire.runtime.server import GrpcServer

    class Reader(FakeExecutor):
        """Reads TEXT aloud."""

        def __init__(self) -> None:
            options = FakeOptions(is_checking=False, latency_s=step_s)
            super().__init__(2, model=FakeModel(vocab_size=49152), options=options, epoch=0)
            self._words = np.array(Tokenizer(files).encode(TEXT), np.int32)
            self._place = 0

        def load_model(self, spec: ModelSpec) -> ModelInfo:
            return replace(super().load_model(spec), tokenizer_sha256="")

        def tokenizer_files(self) -> Mapping[str, bytes]:
            return files

        def _execute(self, plan: StepPlan) -> StepResult:
            time.sleep(step_s)
            slots = plan.slots[plan.num_sampled_tokens > 0]
            self._place += 1
            words = self._words[(self._place + slots) % len(self._words)]
            return StepResult(plan.epoch, plan.step, slots, np.ones_like(slots), words)

    config = EngineConfig(max_num_seqs=128)
    cache = CacheSpec(config.block_size, 16_000, 0, "", config.max_num_seqs, config.max_num_batched_tokens)
    hub = OutputHub()
    core = start_core(Reader(), ModelSpec("fake"), cache, config, hub.publish)
    server = GrpcServer([SERVICE_NAME])
    servicer = EngineCoreServicer(core.info.core_incarnation, hub, KvEventLog(notify=hub.wake_soon))
    servicer.serving, servicer.unavailable = Serving(core.engine, core.info, files, Progress()), ""
    servicer.add_to(server.aio)
    port = await server.start()
    threading.Thread(target=core.engine.run, name="engine", daemon=True).start()
    print_ready("core", "127.0.0.1", port, core.info.core_incarnation)
    while True:
        await asyncio.sleep(core.info.heartbeat_interval_ms / 1000)
        hub.send_heartbeats()


# --- the client's process ---


async def _read(method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes], request: bytes, times: list[float]) -> None:
    async for _ in method(request):
        times.append(time.perf_counter())


async def drive(target: str, num_streams: int, num_tokens: int) -> dict[str, object]:
    """Reads `num_streams` answers at once; messages per token and inter-message times in milliseconds."""
    request = frontend_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=[17, 4, 99, 3000]),
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    ).SerializeToString()
    arrivals: list[list[float]] = [[] for _ in range(num_streams)]
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        method = channel.unary_stream("/pagewire.v1.FrontendService/Generate")
        await asyncio.gather(*(_read(method, request, times) for times in arrivals))
    gaps = sorted(1e3 * (after - before) for times in arrivals for before, after in itertools.pairwise(times))
    return {
        "num_messages": sum(map(len, arrivals)),
        "num_tokens": num_streams * num_tokens,
        "gap_ms": {f"p{p}": gaps[len(gaps) * p // 100] for p in (50, 99)},
    }


# --- the measurement ---


@dataclass(frozen=True, slots=True)
class Load:
    """What the processes did while the tokens were streamed."""

    frontend_us: float
    """CPU time of the frontend per token."""
    core_us: float
    """The same of the core's process."""
    num_messages: float
    """Messages per token; below 1 where deltas were merged."""
    gap_ms: Mapping[str, float]


@contextmanager
def _process(*arguments: str) -> Iterator[tuple[psutil.Process, str]]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and (line := process.stdout.readline()):
            if (ready := parse_ready(line)) is not None:
                yield psutil.Process(process.pid), ready.address
                return
        raise RuntimeError(f"{arguments[0]} did not become ready")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of all threads that live, by the scheduler's nanosecond count."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def measure_processes(model: str, num_streams: int, num_tokens: int, step_s: float, runs: int) -> list[Load]:
    """`runs` measurements after a short one to warm up."""
    (found,) = measure_variants(model, num_streams, num_tokens, step_s, runs, [()])
    return found


def measure_variants(
    model: str, num_streams: int, num_tokens: int, step_s: float, runs: int, variants: Sequence[Sequence[str]]
) -> list[list[Load]]:
    """`runs` measurements of a frontend for each set of flags, in turns, after a short one each to warm up."""
    me = str(Path(__file__))
    found: list[list[Load]] = [[] for _ in variants]
    with ExitStack() as processes:
        core, core_address = processes.enter_context(_process(me, "core", f"--model={model}", f"--step-s={step_s}"))
        command = ("-m", "frontend_svc", "--port=0", "--log-level=warning", f"--core={core_address}")
        frontends = [processes.enter_context(_process(*command, *flags)) for flags in variants]
        for count in [max(2, num_tokens // 8), *[num_tokens] * runs]:
            for loads, (frontend, target) in zip(found, frontends, strict=True):
                before = _cpu_s(frontend), _cpu_s(core)
                client = [sys.executable, me, "client", target, str(num_streams), str(count)]
                done = json.loads(subprocess.run(client, check=True, stdout=subprocess.PIPE, text=True).stdout)
                used = _cpu_s(frontend) - before[0], _cpu_s(core) - before[1]
                per_token = [1e6 * seconds / done["num_tokens"] for seconds in used]
                loads.append(Load(*per_token, done["num_messages"] / done["num_tokens"], done["gap_ms"]))
    return [loads[1:] for loads in found]


def measure_bare(num_streams: int, num_tokens: int, step_s: float, runs: int) -> list[float]:
    """CPU microseconds per message of a gRPC server that does nothing but send, one message per token."""
    me, found = Path(__file__), []
    with _process(str(me.with_name("bare_server.py")), str(step_s)) as (server, target):
        for count in [max(2, num_tokens // 8), *[num_tokens] * runs]:
            before = _cpu_s(server)
            command = [sys.executable, str(me), "client", target, str(num_streams), str(count)]
            done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            found.append(1e6 * (_cpu_s(server) - before) / done["num_messages"])
    return found[1:]


def main(argv: Sequence[str]) -> None:
    """The processes behind `measure_processes`, and a measurement by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    core = commands.add_parser("core")
    core.add_argument("--model", default="smollm2")
    core.add_argument("--step-s", type=float, default=0.02)
    client = commands.add_parser("client")
    client.add_argument("target")
    client.add_argument("num_streams", type=int)
    client.add_argument("num_tokens", type=int)
    load = commands.add_parser("load")
    load.add_argument("--model", default="smollm2")
    load.add_argument("--streams", type=int, default=64)
    load.add_argument("--tokens", type=int, default=200)
    load.add_argument("--step-s", type=float, default=0.02)
    load.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    if args.command == "core":
        asyncio.run(serve_core(load_tokenizer_files(args.model), args.step_s))
    elif args.command == "client":
        print(json.dumps(asyncio.run(drive(args.target, args.num_streams, args.num_tokens))))
    else:
        for load_found in measure_processes(args.model, args.streams, args.tokens, args.step_s, args.runs):
            print(load_found)


if __name__ == "__main__":
    main(sys.argv[1:])
