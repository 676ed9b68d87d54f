"""A deployment of three real processes with metrics on, what a scrape of them says, and calls to make them count."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pagewire.runtime.transport import sync_channel
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import frontend_pb2_grpc, types_pb2
from tests.system.deployment import Deployment
from tests.telemetry.tiny_checkpoint import write_checkpoint

SERVICES = ("frontend", "core", "worker")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
Scrape = dict[str, Any]
"""Families by name, as prometheus_client's strict parser of OpenMetrics reads them."""


def fetch(port: int, accept: str = OPENMETRICS) -> tuple[str, str]:
    """Text and content type of an endpoint."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode(), response.headers["Content-Type"]


def parse(text: str) -> Scrape:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(scrape: Scrape, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels."""
    found = [
        sample.value
        for family in scrape.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no sample {name} {labels}"
    return sum(found)


def eventually(condition: Callable[[], bool], timeout_s: float = 15.0, what: str = "it") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not become true in {timeout_s} s"
        time.sleep(0.05)


class Measured:
    """Worker, core and frontend with an endpoint each, and a stub."""

    def __init__(self, folder: Path, core_flags: Sequence[str] = ()) -> None:
        """`folder`: where the model is written."""
        metrics = ("--metrics-port=0", "--metrics-host=127.0.0.1")
        worker = (f"--model={write_checkpoint(folder / 'model')}", "--num-threads=1", "--kv-cache-memory=64MiB")
        self._deployment = Deployment(
            (*metrics, "--load-format=dummy", *core_flags),
            metrics,
            (*metrics, *worker),
            {"PAGEWIRE_KERNELS": "reference", "PAGEWIRE_KERNEL_CACHE": str(folder)},
        )

    def __enter__(self) -> Self:
        self._deployment.__enter__()
        processes = self._deployment.processes
        self.ports = {service: _metrics_port(processes[service]) for service in SERVICES}
        self.channel = sync_channel(self._deployment.address("frontend"))
        self.stub = frontend_pb2_grpc.FrontendServiceStub(self.channel)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.channel.close()
        self._deployment.__exit__(kind, error, tb)

    def kill(self, service: str) -> None:
        """SIGKILL."""
        process = self._deployment.processes[service]
        process.popen.kill()
        process.popen.wait(10)

    def scrape(self, service: str) -> Scrape:
        return parse(fetch(self.ports[service])[0])

    def generate(
        self,
        token_ids: Iterable[int] = (),
        *,
        text: str = "",
        trace: str = "",
        timeout_s: float = 120.0,
        request_id: str = "",
        model: str = "",
        **params: Any,
    ) -> Any:
        """The call of a request that ignores the end of text unless told otherwise."""
        params.setdefault("ignore_eos", True)
        params.setdefault("temperature", 0)
        request = pb.GenerateRequest(
            request_id=request_id, model=model, sampling_params=types_pb2.SamplingParams(**params)
        )
        if text:
            request.text = text
        else:
            request.token_ids.ids.extend(token_ids)
        metadata = [("traceparent", trace)] if trace else []
        return self.stub.Generate(request, timeout=timeout_s, metadata=metadata)

    def chat(self, text: str, **params: Any) -> Any:
        """The call of a conversation of one message."""
        request = pb.ChatRequest(sampling_params=types_pb2.SamplingParams(**params))
        request.messages.add(role=pb.CHAT_ROLE_USER, content=text)
        return self.stub.Chat(request, timeout=120)

    def is_running(self) -> bool:
        """A request runs in the core."""
        return value(self.scrape("core"), "pagewire_core_requests_running") > 0

    def is_idle(self) -> bool:
        """Nothing lives any more, and everything that ended was counted."""
        core, frontend = self.scrape("core"), self.scrape("frontend")
        lives = value(core, "pagewire_core_requests_running") + value(core, "pagewire_core_requests_waiting")
        lives += value(frontend, "pagewire_frontend_requests_live")
        ended = value(core, "pagewire_core_requests_ended_total")
        return lives == 0 and ended == value(core, "pagewire_core_requests_added_total")


def _metrics_port(process: Any) -> int:
    """From the line that the process logs."""

    def find() -> re.Match[str] | None:
        return re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", process.output)

    eventually(lambda: find() is not None, what="the log line of the metrics' port")
    match = find()
    assert match is not None
    return int(match[1])


def finish(call: Any) -> list[Any]:
    """All messages of a call."""
    return list(call)


def failed(call: Any) -> grpc.StatusCode:
    """The code of a call that must fail."""
    try:
        finish(call)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]
    raise AssertionError("the call did not fail")


class Background:
    """Runs calls on threads of their own until told to stop; errors of single calls are part of a fault's test."""

    def __init__(self, make: Callable[[], Any], num_threads: int = 2) -> None:
        self._make, self._is_over = make, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                finish(self._make())
            except grpc.RpcError:
                self._is_over.wait(0.1)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)
