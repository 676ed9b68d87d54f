"""Mutual TLS on every hop, API keys, probes beside it, and a shutdown of all three services at the same moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from deployment import WORKER_FLAGS, Deployment, Process, environment
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.client import Client
from pagewire.errors import PagewireError, UnauthenticatedError, UnavailableError
from pagewire.runtime.transport import TlsConfig

pytestmark = [pytest.mark.system, pytest.mark.slow]
KEY = "a-key-for-this-test-only"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def tls_of(authority: Authority, name: str) -> TlsConfig:
    cert_file, key_file = authority.issue(name)
    return TlsConfig(str(authority.ca_file), str(cert_file), str(key_file))


def flags_of(tls: TlsConfig) -> tuple[str, ...]:
    return f"--tls-ca-file={tls.ca_file}", f"--tls-cert-file={tls.cert_file}", f"--tls-key-file={tls.key_file}"


def keys_file(folder: Path) -> str:
    path = folder / "keys"
    path.write_text(f"tester:{KEY}\n")
    return f"--api-keys-file={path}"


@pytest.fixture
def deployment(authority: Authority, tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, int], TlsConfig]]:
    """Three services that speak TLS with one another, and the ports of their probes."""
    deployed, ports = Deployment(), {}
    common = ("--health-port=0", "--health-host=127.0.0.1", "--lame-duck-s=1", "--drain-s=120")

    def start(service: str, *flags: str) -> str:
        ready = deployed.start(service, *flags, *common, *flags_of(tls_of(authority, service)))
        (line,) = [line for line in deployed.processes[service].lines if "health without TLS on port" in line]
        ports[service] = int(line.rsplit(" ", 1)[1])
        return ready.address

    try:
        worker = start("worker", *WORKER_FLAGS)
        core = start("core", f"--worker={worker}")
        start("frontend", f"--core={core}", keys_file(tmp_path))
        yield deployed, ports, tls_of(authority, "client")
    finally:
        deployed.kill()


def probe(port: int, service: str = "readiness") -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


def test_all_get_their_signal_at_once(deployment: tuple[Deployment, dict[str, int], TlsConfig]) -> None:
    """As `helm uninstall` and the drain of a node do it: running streams end in full, probes answer to the end, new
    calls are taken during the lame duck's time, and all three end by themselves.

    Case: llm-d-router#1885
    """
    deployed, ports, tls = deployment
    target = deployed.address("frontend")
    assert {probe(port, name) for port in ports.values() for name in ("", "readiness", "liveness")} == {SERVING}
    for options in ({}, {"tls": TlsConfig(ca_file=tls.ca_file), "api_key": KEY}):
        with Client(target, timeout_s=10, **options) as stranger, pytest.raises(UnavailableError):
            stranger.get_model()
    with Client(target, timeout_s=10, tls=tls) as nobody, pytest.raises(UnauthenticatedError):
        nobody.get_model()
    with Client(target, timeout_s=150, tls=tls, api_key=KEY) as client, ThreadPoolExecutor() as pool:
        first = client.generate("Once upon a time", max_tokens=120, temperature=0, ignore_eos=True)
        next(first)
        for process in deployed.processes.values():
            process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert {probe(port) for port in ports.values()} == {NOT_SERVING}
        late = pool.submit(client.complete, "Long ago", max_tokens=60, temperature=0, ignore_eos=True)
        time.sleep(1.2)
        with pytest.raises(PagewireError) as refused:
            client.complete("Too late", max_tokens=1)
        assert isinstance(refused.value, UnavailableError)
        assert {probe(ports[name], "liveness") for name in ("frontend", "core", "worker")} == {SERVING}
        assert sum(len(part.outputs[0].token_ids) for part in first) == 119
        assert len(late.result().outputs[0].token_ids) == 60
        assert [process.popen.wait(150) for process in deployed.processes.values()] == [0, 0, 0]


def test_serve_speaks_tls_and_shows_an_answer(authority: Authority, tmp_path: Path) -> None:
    """`pagewire serve` hands TLS and keys on to its processes, and its own demo and the command line use them."""
    tls = tls_of(authority, "everybody")
    flags = (*flags_of(tls), keys_file(tmp_path), "--port=0", *WORKER_FLAGS)
    environ = {**environment(), "PAGEWIRE_API_KEY": KEY}
    process = Process([sys.executable, "-m", "pagewire.cli", "serve", *flags], environ=environ)
    try:
        target = process.wait_line(lambda line: line.split("--server ")[1].split()[0] if "--server " in line else None)
        assert "tokens in" in process.output and "No answer is shown" not in process.output
        command = [sys.executable, "-m", "pagewire.cli", "generate", "--server", target, "--max-tokens", "3", "Hello"]
        done = subprocess.run([*command, *flags_of(tls)], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "3 generated" in done.stderr, done.stderr
        done = subprocess.run([*command, *flags_of(tls)], env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "authorization" in done.stderr
    finally:
        process.stop()
