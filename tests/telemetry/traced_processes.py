"""Frontend, core and worker as processes of their own, with a tiny model, that send their spans to a collector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagewire.runtime.lifetime import SUPERVISOR_VARIABLE
from pagewire.runtime.ready import Ready, parse_ready
from tests.frontend.small_tokenizers import sentencepiece_json
from tests.system.deployment import Process, environment

HERE = Path(__file__).parent
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> Path:
    """A Llama with random weights and a tokenizer that knows every byte."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "</s>"}
    for name, value in (
        ("config.json", CONFIG),
        ("tokenizer.json", sentencepiece_json()),
        ("tokenizer_config.json", tokenizer),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


def traced(endpoint: str, **variables: str) -> dict[str, str]:
    """The environment of a process that sends its spans there, soon."""
    kept = {key: value for key, value in environment().items() if not key.startswith("OTEL_")}
    return {**kept, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", **variables}


class Collector:
    """rotel between the services and the receiver: OTLP in, OTLP out."""

    def __init__(self, exports_to: str, folder: Path) -> None:
        spec = find_spec("rotel")
        assert spec is not None and spec.origin is not None
        command = [str(Path(spec.origin).parent / "rotel-agent"), "start", "--exporter", "otlp"]
        command += ["--otlp-exporter-endpoint", exports_to, "--otlp-exporter-protocol", "grpc"]
        command += ["--batch-timeout", "50ms", "--pid-file", str(folder / "pid"), "--log-file", str(folder / "log")]
        self.port = free_port()
        command += ["--otlp-grpc-endpoint", f"127.0.0.1:{self.port}"]
        command += ["--otlp-http-endpoint", f"127.0.0.1:{free_port()}"]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process = Process(command)
        deadline = time.monotonic() + 30
        while not _is_open(self.port):
            assert self.process.popen.poll() is None and time.monotonic() < deadline, self.process.output
            time.sleep(0.02)

    def close(self) -> None:
        self.process.stop()


class TracedDeployment:
    """The three services; order of the start as in a deployment. `stop` lets them flush."""

    def __init__(self, endpoint: str, model: Path) -> None:
        self.processes: dict[str, Process] = {}
        self.ready: dict[str, Ready] = {}
        # The plain definitions of the kernels: nothing has to be compiled for so small a model.
        self._environ = {**traced(endpoint), SUPERVISOR_VARIABLE: str(os.getpid()), "PAGEWIRE_KERNELS": "reference"}
        try:
            self._start("worker", "--num-threads=1", "--kv-cache-memory=16MiB")
            # Blocks for about two of the long requests of these tests: some have to wait, or are preempted.
            core = ["--load-format=dummy", f"--model={model}", "--num-kv-blocks=60", "--max-num-seqs=8"]
            self._start("core", f"--worker={self.ready['worker'].address}", *core)
            self._start("frontend", f"--core={self.ready['core'].address}")
        except BaseException:
            self.kill()
            raise

    def _start(self, service: str, *flags: str) -> None:
        process = Process([sys.executable, "-m", f"{service}_svc", "--port=0", *flags], environ=self._environ)
        self.processes[service] = process
        self.ready[service] = process.wait_line(parse_ready)

    @property
    def target(self) -> str:
        return self.ready["frontend"].address

    def pid(self, service: str) -> int:
        return self.processes[service].pid

    def stop(self) -> None:
        try:
            for service in ("frontend", "core", "worker"):
                assert self.processes[service].stop() == 0, self.processes[service].output
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes.values():
            process.popen.kill()
            process.stop()


def run_client(endpoint: str, target: str, what: str) -> dict[str, Any]:
    """Runs trace_client.py, a program of somebody else's that uses opentelemetry and our client; what it says."""
    command = [sys.executable, str(HERE / "trace_client.py"), target, what]
    done = subprocess.run(command, env=traced(endpoint), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
