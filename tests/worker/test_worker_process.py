"""The worker as a process: ready line, signals, bad settings, a parent that dies, idle load."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.worker.mini_core import MiniCore, request
from tests.worker.worker_support import ROOT, Client, worker_process, write_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_serves_and_ends_on_sigterm_with_an_open_stream(tmp_path):
    """Case: vllm#48966"""
    model = str(write_tiny_model(tmp_path / "tiny"))
    with worker_process("--model", model) as (process, ready):
        client = Client(ready.address)
        health = health_pb2_grpc.HealthStub(client.channel)
        for service in ("", "readiness", "liveness", "pagewire.v1.WorkerService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert client.handshake().worker_incarnation == ready.incarnation
        client.load("", load_format="dummy")  # the default model
        client.initialize_cache()
        stream = client.stream()
        stream.opened()
        core = MiniCore(stream.execute, num_blocks=100, block_size=4)
        assert len(core.generate([request([5, 6, 7])], 5)[0]) == 5

        idle = psutil.Process(process.pid)
        before = sum(idle.cpu_times()[:2])
        time.sleep(3.0)
        assert (sum(idle.cpu_times()[:2]) - before) / 3.0 < 0.02  # Case: vllm#16968

        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        try:
            stream.message()
            raise AssertionError("the stream goes on")
        except Exception as error:
            assert "shutting down" in str(error)
        client.close()


def test_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "worker_svc", "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and str(port) in done.stderr and "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--preload"], 2, "--preload needs --model"),
        (["--device", "tpu"], 2, "--device is 'tpu'"),
        (["--kv-cache-memory", "lots"], 2, "--kv-cache-memory"),
        (["--model", "./nowhere", "--preload", "--port", "0"], 1, "no such file"),
    ],
)
def test_bad_settings(flags, status, said):
    command = [sys.executable, "-m", "worker_svc", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status and said in done.stderr and "Traceback" not in done.stderr


def test_dies_with_its_parent(tmp_path):
    """Case: vllm#48966"""
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-m', 'worker_svc', '--port', '0', '--die-with-parent'], "
        "stdout=subprocess.PIPE, text=True); print(p.stdout.readline(), p.pid, flush=True); time.sleep(120)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert "ready on" in parent.stdout.readline()
        worker = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 8
        while psutil.pid_exists(worker) and time.monotonic() < deadline:
            if psutil.Process(worker).status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.05)
        else:
            assert not psutil.pid_exists(worker)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
