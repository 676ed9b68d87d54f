"""What `pagewire serve` puts into its processes' environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagewire.supervisor import GRPC_EXPERIMENTS, child_environment

NUM_CALLS = 200
CALLS = f"""
import pathlib, re, grpc
from concurrent.futures import ThreadPoolExecutor
echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x", {{"Echo": echo}})])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
    for _ in range({NUM_CALLS}):
        channel.unary_unary("/x/Echo")(b"", timeout=20)
    tasks = [task for task in pathlib.Path("/proc/self/task").iterdir() if "event_eng" in (task / "comm").read_text()]
    said = [re.search(r"voluntary_ctxt_switches:\\s*(\\d+)", (task / "status").read_text()) for task in tasks]
    print(sum(int(found[1]) for found in said))
server.stop(None)
"""


def num_wakes(environ: dict[str, str]) -> int:
    """How often gRPC's own polling threads slept and woke during some calls of a process to itself."""
    command = [sys.executable, "-c", CALLS]
    return int(subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_what_the_user_chose_for_grpc_stays():
    assert child_environment({})["GRPC_EXPERIMENTS"] == GRPC_EXPERIMENTS
    assert child_environment({"GRPC_EXPERIMENTS": "x", "A": "b"}).items() >= {"GRPC_EXPERIMENTS": "x", "A": "b"}.items()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="nothing tells how often a thread woke")
def test_grpc_polls_with_the_thread_that_waits():
    """A gRPC that has got another way to poll, or another name for this one, should be noticed here."""
    without = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    usual = num_wakes(without)
    assert usual > NUM_CALLS
    # Some wakes are of timers: the slower the machine, the more of them, in both.
    assert num_wakes(child_environment(without)) < usual / 2
