"""Where the peers and the models of the benchmark are, and the environment variables that they run with."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / ".peers"
MODELS = PEERS / "models"
CHECKPOINT = MODELS / "smollm2-bf16"
GGUF_BF16 = MODELS / "smollm2-BF16.gguf"
GGUF_Q8_0 = MODELS / "smollm2-Q8_0.gguf"
VLLM_PYTHON = PEERS / "vllm/bin/python"
LLAMA_PYTHON = PEERS / "llama/bin/python"
TCMALLOC = PEERS / "lib/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
OPENMP = PEERS / "vllm/lib/libiomp5.so"
KV_CACHE_GIB = 1


def vllm_env() -> dict[str, str]:
    """vLLM's best case on few cores: both libraries that it recommends, and every core computes.

    Left to itself (`auto`) it keeps one core for its scheduler and computes on the others.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {
        "LD_PRELOAD": f"{TCMALLOC}:{OPENMP}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores))),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{VLLM_PYTHON.parent}:{os.environ['PATH']}",
    }


def llama_env() -> dict[str, str]:
    """llama.cpp's best case: a thread per core. Left to itself Linux may put both on one, where they spin for each
    other: a step then takes many times as long.
    """
    return {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
