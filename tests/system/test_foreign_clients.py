"""Clients that no one here wrote: grpcurl through reflection, and Node with code made from the protos."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROTOS = HERE.parents[1] / "protos"
GRPCURL = Path(sys.executable).parent / "grpcurl"


def grpcurl(*arguments: str) -> str:
    done = subprocess.run([GRPCURL, "-plaintext", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("frontend", "pagewire.v1.FrontendService"),
        ("core", "pagewire.v1.EngineCoreService"),
        ("worker", "pagewire.v1.WorkerService"),
    ],
)
def test_grpcurl_lists_describes_and_checks(deployment, service, name):
    """Reflection and health on every server.

    Case: smg#866
    """
    address = deployment.address(service)
    assert {name, "grpc.health.v1.Health"} <= set(grpcurl(address, "list").split())
    assert f"service {name.rsplit('.', 1)[1]}" in grpcurl(address, "describe", name)
    for health in ("liveness", "readiness", name, ""):
        answer = grpcurl("-d", json.dumps({"service": health}), address, "grpc.health.v1.Health/Check")
        assert json.loads(answer) == {"status": "SERVING"}


def test_grpcurl_generates(deployment):
    body = {"text": "The capital of France is", "sampling_params": {"max_tokens": 5, "temperature": 0}}
    method = "pagewire.v1.FrontendService/Generate"
    output = grpcurl("-d", json.dumps(body), deployment.address("frontend"), method)
    decoder, messages = json.JSONDecoder(), []
    while output := output.strip():
        message, end = decoder.raw_decode(output)
        messages.append(message)
        output = output[end:]
    text = "".join(o.get("text", "") for m in messages for o in m.get("outputs", []))
    assert "Paris" in text
    assert messages[-1]["is_finished"] is True
    assert messages[-1]["usage"]["completion_tokens"] == 5


def test_grpcurl_sees_error_details(deployment):
    """A bad parameter comes back with its path, to a client that knows nothing of us.

    Case: vllm#16529
    """
    body = {"text": "x", "sampling_params": {"top_p": 1.5}}
    command = [GRPCURL, "-plaintext", "-d", json.dumps(body), deployment.address("frontend")]
    done = subprocess.run(
        [*command, "pagewire.v1.FrontendService/Generate"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    for words in ("InvalidArgument", "sampling_params.top_p", "must be in (0, 1]"):
        assert words in done.stderr, done.stderr


def test_node_client(deployment, tmp_path):
    """@grpc/grpc-js with @grpc/proto-loader: model, tokens, a stream, a cancelled stream, an error."""
    for tool in ("node", "npm"):
        assert shutil.which(tool), f"{tool} is missing: apt-get install nodejs npm"
    for name in ("package.json", "package-lock.json", ".npmrc", "client.js"):
        shutil.copy(HERE / "node" / name, tmp_path)
    install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=240, capture_output=True)
    done = subprocess.run(
        ["node", "client.js", str(PROTOS), deployment.address("frontend")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_PROXY": "*"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "smollm2"
    assert found["detokenized"] == "Grüße, 世界 🌍"
    assert "Paris" in found["text"]
    assert found["finishReason"] == "FINISH_REASON_LENGTH"
    assert found["cancelled"] == 1
    assert found["errorCode"] == 3
    assert "sampling_params.top_p" in found["errorMessage"]
