"""Every side by its name: how it is started, and what the tables call it."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.places import CHECKPOINT, GGUF_BF16, GGUF_Q8_0, LLAMA_PYTHON, PEERS, VLLM_PYTHON, llama_env, vllm_env
from bench.served import Served, ServedPagewire, ServedVllm
from bench.sides import Spec

KV_CACHE_BYTES = 2**30
LABELS = {
    "pagewire": "Pagewire bf16, one process",
    "pagewire-int8": "Pagewire int8, one process",
    "pagewire-q4_1": "Pagewire Q4_1 file, one process",
    "pagewire-q8_0": "Pagewire Q8_0 file, one process",
    "pagewire-served": "Pagewire bf16, three processes",
    "pagewire-served-256": "Pagewire bf16, three processes, steps of at most 256 tokens",
    "pagewire-traced-1-served": "Pagewire bf16, three processes, 1 % of requests traced",
    "pagewire-traced-100-served": "Pagewire bf16, three processes, all requests traced",
    "vllm": "vLLM CPU bf16, offline",
    "vllm-served": "vLLM CPU bf16, its OpenAI server",
    "llama-bf16": "llama.cpp bf16",
    "llama-q4_1": "llama.cpp Q4_1 file",
}
TRACE_RATIOS = {"pagewire-traced-1-served": 0.01, "pagewire-traced-100-served": 1.0}
PEER_OF = {"vllm": "vllm", "vllm-served": "vllm", "llama-bf16": "llama", "llama-q4_1": "llama"}


def q4_1_file() -> Path:
    """The GGUF file that `smollm2` stands for."""
    from worker_svc.fetch import resolve_model

    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    return path


def offline_spec(name: str) -> Spec:
    """How an offline side is started."""
    if name == "vllm":
        return Spec(name, [str(VLLM_PYTHON), "bench/peers/vllm_offline.py", str(CHECKPOINT)], vllm_env())
    if name.startswith("llama"):
        model = GGUF_BF16 if name == "llama-bf16" else q4_1_file()
        return Spec(name, [str(LLAMA_PYTHON), "bench/peers/llama_offline.py", str(model)], llama_env())
    flags = [f"--kv-cache-memory={KV_CACHE_BYTES}"]
    if name == "pagewire-q4_1":
        return _ours(name, str(q4_1_file()), *flags, "--quantization=gguf")
    if name == "pagewire-q8_0":
        return _ours(name, str(GGUF_Q8_0), *flags, "--quantization=gguf")
    return _ours(name, str(CHECKPOINT), *flags, *(["--quantization=int8"] if name == "pagewire-int8" else []))


def _ours(name: str, model: str, *flags: str) -> Spec:
    return Spec(name, [sys.executable, "-m", "bench.offline", f"--model={model}", *flags])


def start_served(name: str) -> Served:
    """Starts a served side and waits for its first answer."""
    if name == "vllm-served":
        return ServedVllm(name, VLLM_PYTHON, CHECKPOINT, vllm_env())
    flags = ["--max-num-batched-tokens=256"] if name == "pagewire-served-256" else []
    flags += ["--dtype=bfloat16", f"--kv-cache-memory={KV_CACHE_BYTES}"]
    return ServedPagewire(name, str(CHECKPOINT), *flags, trace_ratio=TRACE_RATIOS.get(name))


def is_installed(peer: str) -> bool:
    return (PEERS / peer / "bin" / ".installed").exists()
