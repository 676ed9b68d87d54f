"""What a worker does not let grow, and what holds where a core says nothing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagewire.columns import EMPTY_INT32
from pagewire.errors import ResourceExhaustedError
from pagewire.plan import StepPlan, StepResult
from tests.worker.worker_support import write_tiny_model
from worker_svc import memory
from worker_svc.compute import ComputeThread
from worker_svc.execute_session import MAX_PENDING_PLANS, ExecuteSession
from worker_svc.worker import Worker


def test_a_core_that_sends_and_does_not_read_is_cut_off():
    def plan(step: int) -> StepPlan:
        return StepPlan(1, step, *(np.empty(0, np.int32) for _ in range(6)))

    async def send_without_reading() -> ExecuteSession:
        def execute(plan, await_mask, on_prepared):
            return StepResult(plan.epoch, plan.step, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32)

        session = ExecuteSession("core-1", 1, SimpleNamespace(start=execute), compute)
        for step in range(1, 3 * MAX_PENDING_PLANS):
            session.submit(plan(step))
            await session.wait_idle()
            session.prompt_heartbeat()
        return session

    compute = ComputeThread()
    session = asyncio.run(send_without_reading())
    assert compute.close(5.0)
    assert session.outgoing.qsize() == MAX_PENDING_PLANS + 1
    items = [session.outgoing.get_nowait() for _ in range(MAX_PENDING_PLANS + 1)]
    assert isinstance(items[-1], ResourceExhaustedError)


def test_defaults_belong_to_the_default_model(tmp_path):
    model = str(write_tiny_model(tmp_path / "tiny"))
    worker = Worker(default_model=model, default_dtype="bfloat16", default_max_model_len=48, num_threads=1)
    for _ in range(2):  # the preload, and the core that leaves everything to the worker
        info = worker.load_model(load_format="dummy")
        assert (info.dtype, info.max_model_len) == ("bfloat16", 48)
    assert worker.load_model(load_format="dummy", dtype="float16", max_model_len=32).dtype == "float16"
    assert worker.load_model(model, load_format="dummy").max_model_len == 128


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_count_as_available(tmp_path, monkeypatch, version):
    """A container that has just read its model has all its memory "used"."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit, usage, reclaimable = names[version]
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / usage).write_text("950000\n")
    groups = [(str(tmp_path), *names[version])]
    monkeypatch.setattr(memory, "_CGROUPS", groups)
    assert memory.available_bytes(torch.device("cpu")) == 50_000
    Path(tmp_path / "memory.stat").write_text(f"anon 7\n{reclaimable} 600000\nother_{reclaimable} 1\n")
    assert memory.available_bytes(torch.device("cpu")) == 650_000
