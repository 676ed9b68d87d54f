"""Settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.runtime.settings import CommonSettings, parse_bytes, setting


@dataclass(frozen=True)
class WorkerSettings(CommonSettings):
    """Run a worker: it loads the model and computes what its core plans."""

    port: int = setting(50053, help="port to listen on; 0 takes a free one", low=0, high=65535)
    device: str = setting("cpu", help="where to compute: cpu, cuda or cuda:<index>")
    model: str = setting(
        "", help="model to load where the core names none: alias, local directory, local .gguf file or hub id"
    )
    preload: bool = setting(False, help="load the model before the worker is ready, not when the core asks")
    dtype: str = setting(
        "",
        help="type of weights of --model",
        choices=("", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting(
        "",
        help="of --model: int8, or gguf to run a GGUF file's own blocks; empty: weights of --dtype",
        choices=("", "int8", "gguf"),
    )
    max_model_len: int = setting(0, help="longest sequence of --model; 0 is the model's own limit", low=0)
    kv_cache_memory: int = setting(
        0,
        help="memory for the KV pool; 0 takes 2 GiB but at most a quarter of what is available; a GPU's is measured",
        low=0,
        metavar="BYTES",
        parse=parse_bytes,
    )
    gpu_memory_utilization: float = setting(
        0.9, help="share of a GPU's memory that this process may fill: weights, steps, KV pool", low=0.01, high=1
    )
    cuda_graphs: bool = setting(True, help="on CUDA, launch a decode step's kernels as one recorded graph")
    num_threads: int = setting(0, help="threads that a computation uses; 0 is one per core", low=0, high=1024)
    die_with_parent: bool = setting(False, help="end when the process that started this one ends")

    def __post_init__(self) -> None:
        if self.preload and not self.model:
            raise ValueError("--preload needs --model")
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
            raise ValueError(f"--device is {self.device!r}: must be cpu, cuda or cuda:<index>")
