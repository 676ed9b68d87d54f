"""The commands that talk to a running server, and the help that a newcomer reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.system.deployment import environment


def pagewire(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=240, env=environment())


def test_help_names_every_command_and_the_precedence():
    done = pagewire("--help")
    assert done.returncode == 0
    for word in ("serve", "generate", "bench", "top", "worker", "core", "frontend", "fetch", "Precedence"):
        assert word in done.stdout
    for command in ("serve", "generate", "bench", "top", "worker", "core", "frontend", "fetch"):
        own = pagewire(command, "--help")
        assert own.returncode == 0, own.stderr
        assert "usage:" in own.stdout
        assert "--" in own.stdout


def test_unknown_command():
    done = pagewire("sevre")
    assert done.returncode == 2
    assert "'sevre'" in done.stderr


def test_help_is_quick_and_light():
    """Neither torch nor a service is imported for it."""
    code = "import sys; from pagewire import cli; cli.main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    for name in ("'torch'", "'grpc'", "'frontend_svc'", "'worker_svc'"):
        assert name not in done.stdout


def test_generate(deployment):
    server = f"--server={deployment.address('frontend')}"
    plain = pagewire("generate", server, "--no-chat", "--max-tokens=5", "--temperature=0", "The capital of France is")
    assert plain.returncode == 0, plain.stderr
    assert "Paris" in plain.stdout
    assert "5 prompt tokens" in plain.stderr
    assert "5 generated" in plain.stderr
    piped = pagewire("generate", server, "--max-tokens=8", "--temperature=0", "--quiet", stdin="What is 1 + 1?")
    assert piped.returncode == 0
    assert piped.stdout.strip()
    assert piped.stderr == ""


def test_top_finds_all_three_services_through_the_frontend(deployment):
    done = pagewire("top", f"--frontend={deployment.address('frontend')}", "--once", "--json", "--interval=0.1")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert {name: found["health"] for name, found in services.items()} == dict.fromkeys(services, "ready")
    assert services["core"]["target"] == deployment.address("core")
    assert services["worker"]["target"] == deployment.address("worker")
    frontend, core, worker = (services[name]["stats"] for name in ("frontend", "core", "worker"))
    assert frontend["cores"][0]["core_incarnation"] == core["process"]["incarnation"] == worker["core_incarnation"]
    assert worker["is_stream_open"] and worker["epoch"] == core["epoch"] >= 1
    assert len({found["process"]["pid"] for found in (frontend, core, worker)}) == 3


def test_generate_says_what_is_wrong(deployment):
    bad = pagewire("generate", f"--server={deployment.address('frontend')}", "--top-p=7", "x")
    assert bad.returncode == 1
    assert "sampling_params.top_p is 7.0: must be in (0, 1]" in bad.stderr
    nobody = pagewire("generate", "--server=127.0.0.1:1", "x")
    assert nobody.returncode == 1
    assert "no frontend answers at 127.0.0.1:1" in nobody.stderr
    assert "Traceback" not in nobody.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--concurrency=0"),
        ("bench", "--num-prompts=-1"),
        ("bench", "--prompt-len=0"),
        ("bench", "--max-tokens=x"),
        ("bench", "--timeout=0"),
        ("bench", "--server=localhost"),
        ("generate", "--timeout=-1", "x"),
        ("generate", "--server=", "x"),
    ],
)
def test_flags_that_make_no_sense(arguments):
    """Refused at once, with the flag and the value, and not found out by hanging."""
    done = pagewire(*arguments)
    assert done.returncode == 2
    flag, _, value = arguments[1].partition("=")
    assert f"argument {flag}: must be" in done.stderr
    assert done.stderr.rstrip().endswith(f"and is {value!r}")


def test_a_terminal_that_cannot_write_the_answer():
    """Characters that the output's encoding lacks are replaced."""
    code = "import sys; from pagewire import cli; cli.main(['--version']); print('\\u6c34 is water')"
    command = [sys.executable, "-c", code]
    variables = {**environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert done.returncode == 0, done.stderr
    assert "? is water" in done.stdout


def test_generate_that_takes_too_long(deployment):
    server = f"--server={deployment.address('frontend')}"
    done = pagewire("generate", server, "--timeout=0.2", "--max-tokens=2000", "--ignore-eos", "x")
    assert done.returncode == 1
    assert "did not finish before the deadline" in done.stderr


def test_bench(deployment, tmp_path):
    server = f"--server={deployment.address('frontend')}"
    flags = ["--num-prompts=4", "--concurrency=2", "--prompt-len=16", "--max-tokens=6", "--json"]
    done = pagewire("bench", server, *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["num_requests"], found["num_errors"]) == (4, 0)
    assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (64, 24)
    assert found["output_tokens_per_s"] == pytest.approx(24 / found["duration_s"], rel=0.01)
    for key in ("time_to_first_token_ms", "inter_token_ms"):
        assert 0 < found[key]["p50"] <= found[key]["p90"] <= found[key]["p99"]

    workload = tmp_path / "workload.jsonl"
    workload.write_text('{"prompt": "Hi", "max_tokens": 2}\n{"prompt_len": 9, "max_tokens": 3}\n')
    table = pagewire("bench", server, f"--workload={workload}")
    assert table.returncode == 0, table.stderr
    assert "num_output_tokens        5" in table.stdout
    workload.write_text('{"prompt": "Hi"}\n')
    bad = pagewire("bench", server, f"--workload={workload}")
    assert bad.returncode == 1
    assert "line 1" in bad.stderr
    workload.write_bytes(b"\xff\xfe")
    binary = pagewire("bench", server, f"--workload={workload}")
    assert binary.returncode == 1
    assert "must be a text file" in binary.stderr
    assert "Traceback" not in binary.stderr


def test_bad_setting_of_a_service():
    done = pagewire("core", "--port=70000")
    assert done.returncode == 2
    assert "--port is '70000': must be in [0, 65535]" in done.stderr


def test_model_that_does_not_exist():
    """A clear error before anything starts."""
    done = pagewire("serve", "--model=./no/such/model")
    assert done.returncode == 1
    assert "no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
