"""`make soak`: a real deployment under random load for minutes, and what must hold during and after it.

During: greedy output of a prompt is always the same; every stream ends with one reason, or with the status that its
client asked for. After: the core holds no request and no block, and no process has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from pagewire.client import AsyncClient
from pagewire.client_types import RequestOptions
from pagewire.engine import FinishReason
from pagewire.errors import DeadlineExceededError
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.sampling import SamplingParams
from pagewire.v1 import core_pb2, core_pb2_grpc
from tests.identity.prompts import PROMPTS
from tests.system.deployment import Deployment

CORE_FLAGS = ("--num-kv-blocks=64", "--max-num-seqs=24", "--max-num-batched-tokens=256", "--dtype=float32")
GROWTH = 1.15
"""Most that resident memory may grow from the first third of the run to its end."""


@dataclass
class Soak:
    """What was done and found."""

    rng: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    greedy: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    num_tokens: int = 0

    async def one(self, client: AsyncClient, number: int) -> None:
        """One request of a random kind."""
        prompt = self.rng.choice(PROMPTS)[:2000]
        max_tokens = self.rng.choice((1, 8, 24, 64))
        kind = self.rng.choice(("greedy", "greedy", "sampled", "cancel", "abort", "deadline", "stop", "many"))
        try:
            await getattr(self, f"_{kind}")(client, prompt, max_tokens, f"{kind}-{number}")
        except Exception as error:
            self.ends[f"{kind}: {type(error).__name__}"] += 1
            self.faults.append(f"{kind}-{number}: {type(error).__name__}: {error}")

    async def _greedy(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        done = await client.complete(
            prompt, temperature=0, max_tokens=max_tokens, options=RequestOptions(request_id=name)
        )
        token_ids = done.outputs[0].token_ids
        self.num_tokens += len(token_ids)
        expected = self.greedy.setdefault((prompt, max_tokens), token_ids)
        if token_ids != expected:
            self.faults.append(f"{name}: greedy output of {prompt[:30]!r} changed")
        self._end("greedy", done.outputs[0].finish_reason)

    async def _sampled(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        params = SamplingParams(
            temperature=self.rng.uniform(0.1, 2), top_p=self.rng.uniform(0.1, 1), top_k=self.rng.choice((0, 5, 50)),
            min_p=self.rng.choice((0.0, 0.1)), repetition_penalty=self.rng.uniform(0.8, 1.5),
            presence_penalty=self.rng.uniform(-1, 1), logprobs=self.rng.choice((None, 0, 5)), max_tokens=max_tokens,
        )  # fmt: skip
        done = await client.complete(prompt, params)
        self.num_tokens += len(done.outputs[0].token_ids)
        self._end("sampled", done.outputs[0].finish_reason)

    async def _many(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        done = await client.complete(prompt, n=3, temperature=1.0, max_tokens=max_tokens)
        if len(done.outputs) != 3:
            self.faults.append(f"{name}: {len(done.outputs)} completions")
        for output in done.outputs:
            self.num_tokens += len(output.token_ids)
            self._end("many", output.finish_reason)

    async def _stop(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        done = await client.complete(prompt, temperature=0, max_tokens=64, stop=["\n", "the", "。"])
        if any(stop in done.outputs[0].text for stop in ("\n", "the", "。")):
            self.faults.append(f"{name}: a stop string is in {done.outputs[0].text!r}")
        self._end("stop", done.outputs[0].finish_reason)

    async def _cancel(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        stream = client.generate(prompt, temperature=0, max_tokens=200, ignore_eos=True)
        wanted = self.rng.randrange(4)
        async for _ in stream:
            if wanted == 0:
                break
            wanted -= 1
        await stream.aclose()  # type: ignore[attr-defined]
        self.ends["cancel: cancelled"] += 1

    async def _abort(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        options = RequestOptions(request_id=name)
        call = asyncio.ensure_future(client.complete(prompt, max_tokens=400, ignore_eos=True, options=options))
        await asyncio.sleep(self.rng.uniform(0, 2))
        await client.abort(name)
        # An abort may come before the request: then the request lives, and a second one must find it.
        while not (await asyncio.wait([call], timeout=1))[0]:
            await client.abort(name)
        self._end("abort", (await call).outputs[0].finish_reason)

    async def _deadline(self, client: AsyncClient, prompt: str, max_tokens: int, name: str) -> None:
        try:
            done = await client.complete(prompt, max_tokens=400, ignore_eos=True, timeout_s=self.rng.uniform(0.05, 2))
            self._end("deadline", done.outputs[0].finish_reason)
        except DeadlineExceededError:
            self.ends["deadline: DEADLINE_EXCEEDED"] += 1

    def _end(self, kind: str, reason: FinishReason | None) -> None:
        self.ends[f"{kind}: {reason.name if reason else None}"] += 1
        if reason is None or (reason is FinishReason.ABORT and kind != "abort"):
            self.faults.append(f"{kind} ended with {reason}")


async def stats(target: str) -> core_pb2.CoreStats:
    async with secure_or_insecure_channel(target, None) as channel:
        request = core_pb2.UtilityRequest(stats=core_pb2.UtilityRequest.Stats())
        return (await core_pb2_grpc.EngineCoreServiceStub(channel).Utility(request, timeout=10)).stats


def memory(deployment: Deployment) -> dict[str, int]:
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in deployment.processes.items()}


async def run(deployment: Deployment, soak: Soak, seconds: float, concurrency: int) -> None:
    """Load, then the checks of what is left."""
    end = time.monotonic() + seconds
    numbers = iter(range(10**9))
    early: dict[str, int] = {}

    async def client_loop(client: AsyncClient) -> None:
        while time.monotonic() < end:
            await soak.one(client, next(numbers))

    async def report() -> None:
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(30, left))
            if not early and left < seconds * 2 / 3:
                early.update(memory(deployment))
            print(f"{left:6.0f} s left, {sum(soak.ends.values())} ends, {len(soak.faults)} faults", flush=True)

    async with AsyncClient(deployment.address("frontend")) as client:
        await asyncio.gather(report(), *(client_loop(client) for _ in range(concurrency)))
    await asyncio.sleep(3)
    found = await stats(deployment.address("core"))
    if found.num_running or found.num_waiting or found.num_used_blocks:
        soak.faults.append(f"left over: {found}")
    for name, late in memory(deployment).items():
        print(f"{name}: {early.get(name, late) / 2**20:.0f} MiB after a third, {late / 2**20:.0f} MiB at the end")
        if late > early.get(name, late) * GROWTH:
            soak.faults.append(f"{name} has grown from {early[name]} to {late} bytes")
    print(f"{found.num_steps} steps, {found.num_preemptions} preemptions, {found.prefix_cache_hits} cached tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="length of the load (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random load (default: %(default)s)")
    args = parser.parse_args()
    soak = Soak(random.Random(args.seed))
    with Deployment(CORE_FLAGS) as deployment:
        asyncio.run(run(deployment, soak, args.minutes * 60, args.concurrency))
        dead = [name for name, process in deployment.processes.items() if process.popen.poll() is not None]
        soak.faults += [f"{name} died" for name in dead]
    for name, count in sorted(soak.ends.items()):
        print(f"{count:7d}  {name}")
    print(f"{soak.num_tokens} tokens checked or counted, {len(soak.faults)} faults")
    for fault in soak.faults[:20]:
        print(f"FAULT {fault}")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
