"""The served sides: our three processes, and vLLM's OpenAI server; both are timed from command to first answer."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.clients import Load, openai_load, pagewire_load
from bench.process_group import ProcessGroup, SideError
from bench.trace_sink import TraceSink
from bench.workloads import Workload, load

START_TIMEOUT_S = 400
HOST = "127.0.0.1"


class Served(ProcessGroup):
    """A deployment. `start_s` is the time from its command to the end of a one-token answer."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        started = time.monotonic()
        super().__init__(name, command, env or {}, has_pipes=False)
        try:
            self._wait_for_answer(started + START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - started

    def _wait_for_answer(self, deadline: float) -> None:
        one_token = load("single_stream").with_max_tokens(1)
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SideError(self.last_words())
            if self.is_listening():
                try:
                    self.load(one_token, 1)
                    return
                except (OSError, RuntimeError):
                    pass  # it listens and does not serve yet
            time.sleep(0.05)
        raise SideError(f"{self.name} gave no answer within {START_TIMEOUT_S} s")

    def is_listening(self) -> bool:
        raise NotImplementedError

    def load(self, workload: Workload, num_clients: int) -> Load:
        """One pass of streaming clients in a closed loop."""
        raise NotImplementedError


class ServedPagewire(Served):
    """`pagewire serve`: frontend, core and worker; trace_ratio is the share of requests that is traced, None: off."""

    def __init__(self, name: str, model: str, *flags: str, trace_ratio: float | None = None) -> None:
        self._port = free_port()
        self._sink = TraceSink() if trace_ratio is not None else None
        env: dict[str, str] = {}
        if self._sink is not None:
            env = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": self._sink.endpoint,
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            }
            env["OTEL_TRACES_SAMPLER_ARG"] = str(trace_ratio)
        command = [sys.executable, "-m", "pagewire.cli", "serve", f"--model={model}", f"--port={self._port}"]
        super().__init__(name, [*command, "--no-demo", *flags], env)

    def is_listening(self) -> bool:
        return bool(self._core()) and is_open(self._port)

    def close(self) -> None:
        super().close()
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _core(self) -> str:
        """The core's address, which is printed when everything is up."""
        found = re.search(r"^\s*core\s+(\S+:\d+)", self.said(), re.MULTILINE)
        return found.group(1) if found else ""

    def load(self, workload: Workload, num_clients: int) -> Load:
        return asyncio.run(pagewire_load(f"{HOST}:{self._port}", self._core(), workload, num_clients))


class ServedVllm(Served):
    """vLLM's OpenAI server."""

    def __init__(self, name: str, python: Path, checkpoint: Path, env: Mapping[str, str]) -> None:
        self._port = free_port()
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--dtype", "bfloat16", "--host", HOST, "--port", str(self._port)]
        command += ["--disable-uvicorn-access-log"]
        # The development mode adds nothing but routes, among them the one that empties the prefix cache.
        super().__init__(name, command, {**env, "VLLM_SERVER_DEV_MODE": "1"})

    def is_listening(self) -> bool:
        return is_open(self._port)

    def load(self, workload: Workload, num_clients: int) -> Load:
        return asyncio.run(openai_load(HOST, self._port, workload, num_clients))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
