"""The bars that the project has set itself, each with the figure that it is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure's key and the limit that its median must keep."""

    key: str
    what: str
    limit: float
    is_at_least: bool = True

    def is_met(self, median: float) -> bool:
        return median >= self.limit if self.is_at_least else median <= self.limit

    @property
    def target(self) -> str:
        return f"{'≥' if self.is_at_least else '≤'} {self.limit:g}"


def at_most(key: str, what: str, limit: float) -> Bar:
    return Bar(key, what, limit, is_at_least=False)


_STEP_LIMITS = {2: 2.0, 4: 2.0, 8: 1.4, 32: 1.15, 64: 1.15}

BARS = (
    Bar("single/pagewire:vllm", "one stream, bf16, decode, against vLLM CPU", 2.2),
    Bar("single/pagewire:llama-bf16", "one stream, bf16, decode, against llama.cpp bf16", 1.25),
    Bar("single/pagewire-q4_1:llama-q4_1", "one stream, the same Q4_1 file, decode, against llama.cpp", 1.2),
    Bar("batch/pagewire-int8:vllm", "offline batch, int8, against vLLM CPU bf16", 2.0),
    *(
        Bar(f"steps/{n}/pagewire:vllm", f"decode step at batch {n}, against vLLM CPU", x)
        for n, x in _STEP_LIMITS.items()
    ),
    Bar("batch/pagewire:vllm", "offline batch, bf16, against vLLM CPU", 1.25),
    Bar("shared/pagewire:vllm", "shared prefix, bf16, against vLLM CPU", 1.5),
    Bar("clients/throughput/pagewire-served:vllm-served", "16 streaming clients, tokens/s, against vLLM's server", 1.6),
    at_most(
        "clients/ttft_p99/pagewire-served:vllm-served", "16 streaming clients, TTFT p99, against vLLM's server", 0.5
    ),
    at_most("clients/itl_p99/pagewire-served:vllm-served", "16 streaming clients, ITL p99, against vLLM's server", 0.5),
    Bar("batch/pagewire-served:pagewire", "three processes against one, offline batch", 0.95),
    Bar("batch/pagewire-served:vllm", "three processes, offline batch, against vLLM CPU offline", 1.15),
    at_most(
        "single/itl_p50/pagewire-served-pagewire", "one stream, ITL p50, three processes less one process, ms", 0.5
    ),
    at_most("scheduler/256", "scheduler per running request and step at 256, us", 1.5),
    at_most("scheduler/1024", "scheduler per running request and step at 1,024, us", 1.5),
    at_most("frontend/cpu", "frontend, CPU per streamed token with the gRPC write, us", 40),
    at_most("frontend/detokenize", "frontend, detokenizing and stop search per token, us", 10),
    at_most("memory/pagewire-served:vllm-served", "memory of all processes, against vLLM's server", 0.6),
    Bar("tracing/pagewire-traced-1-served:pagewire-served", "1 % of requests traced, tokens/s against none", 0.99),
    at_most("cold/pagewire-served", "cold start: command to first answer, s", 20),
)
