"""GrpcExecutor against a WorkerService: what it refuses, checks and reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from core_svc.execute_client import Progress
from core_svc.executor import CacheSpec, ModelSpec
from core_svc.worker_client import GrpcExecutor
from pagewire.columns import EMPTY_INT32
from pagewire.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PagewireError,
    UnavailableError,
)
from pagewire.plan import NewRequest, StepPlan
from pagewire.sampling import SamplingParams
from pagewire.v1 import types_pb2
from tests.core_edge.harness import eventually
from tests.core_edge.worker_server import MODEL, TOKENIZER_FILES, Script, ScriptedWorker, model_info

SPEC = CacheSpec(block_size=4, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=32)


def with_executor(
    body: Callable[[GrpcExecutor, ScriptedWorker, list[PagewireError]], None],
    script: Script | None = None,
    change: Callable[[ScriptedWorker], None] = lambda worker: None,
) -> None:
    """Runs the blocking body on a thread, against a worker on the loop."""

    async def run() -> None:
        worker = ScriptedWorker(script)
        change(worker)
        address = await worker.start()
        losses: list[PagewireError] = []
        executor = GrpcExecutor(address, "core-1", on_lost=losses.append, silence_s=1.0)
        try:
            await asyncio.to_thread(body, executor, worker, losses)
        finally:
            await asyncio.to_thread(executor.shutdown)
            await worker.stop()

    asyncio.run(run())


def row_plan(epoch: int, step: int) -> StepPlan:
    """Step 1: a request of three tokens; later steps: one token more."""
    is_first = step == 1
    params = SamplingParams(temperature=0.0, seed=1)
    new = [NewRequest(0, "f", 1, np.array([5, 6, 7], np.int32), 3, params)] if is_first else []
    column = lambda value: np.array([value], np.int32)  # noqa: E731
    return StepPlan(
        epoch=epoch,
        step=step,
        slots=column(0),
        num_scheduled_tokens=column(3 if is_first else 1),
        num_computed_tokens=column(0 if is_first else step + 1),
        num_sampled_tokens=column(1),
        num_new_blocks=column(2 if is_first else 0),
        new_block_ids=np.array([1, 2], np.int32) if is_first else EMPTY_INT32,
        new_requests=new,
    )


def connect(executor: GrpcExecutor, epoch: int = 1) -> None:
    executor.handshake()
    executor.load_model(ModelSpec(model="scripted"))
    executor.initialize_cache(SPEC, epoch)


def test_the_whole_way() -> None:
    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        info = executor.handshake()
        assert (info.worker_incarnation, info.device, info.epoch, info.model) == (
            worker.servicer.incarnation,
            "cpu",
            0,
            None,
        )
        assert executor.load_model(ModelSpec()) == model_info()
        assert executor.tokenizer_files() == TOKENIZER_FILES
        cache = executor.initialize_cache(SPEC, 3)
        assert (cache.num_blocks, cache.bytes_per_block, cache.kv_cache_dtype) == (8, 1024, "float32")
        # Two plans at once: results come in order.
        futures = [executor.submit(row_plan(3, step)) for step in (1, 2)]
        tokens = [int(future.result(5).token_ids[0]) for future in futures]
        assert tokens == MODEL.generate([5, 6, 7], SamplingParams(temperature=0.0, seed=1), 2)
        assert executor.sleep(1) == 123
        executor.wake_up()
        assert executor.profile(True) == "profile.json"
        assert losses == []

    with_executor(body)


def test_a_stale_epoch_and_a_gap_are_refused() -> None:
    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        for stale in (row_plan(1, 1), row_plan(2, 2)):
            worker.servicer.epoch = 0
            connect(executor, 2)
            with pytest.raises(FailedPreconditionError):
                executor.submit(stale).result(5)
        assert [error.code for error in losses] == ["FAILED_PRECONDITION"] * 2
        with pytest.raises(FailedPreconditionError, match="not above"):
            executor.initialize_cache(SPEC, 1)

    def forget(worker: ScriptedWorker) -> None:
        # The fake executor itself counts epochs too; here each connection begins anew.
        original = worker.servicer.executor.initialize_cache
        numbers = iter(range(1, 100))
        worker.servicer.executor.initialize_cache = lambda spec, epoch: original(spec, next(numbers))  # type: ignore[method-assign]

    with_executor(body, change=forget)


def test_everything_fails_clearly_without_a_worker() -> None:
    executor = GrpcExecutor("127.0.0.1:1", "core-1")
    with pytest.raises(UnavailableError, match="no connection"):
        executor.submit(row_plan(1, 1)).result(1)
    with pytest.raises(UnavailableError, match="no connection"):
        executor.sleep(1)
    with pytest.raises(UnavailableError, match="refused"):
        executor.handshake(timeout_s=2)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(UnavailableError, match="shuts down"):
        executor.handshake()


def test_pending_plans_fail_at_once_when_the_connection_is_closed() -> None:
    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        connect(executor)
        worker.script.hold.clear()
        future = executor.submit(row_plan(1, 1))
        started_s = time.monotonic()
        executor.shutdown()
        with pytest.raises(UnavailableError):
            future.result(5)
        assert time.monotonic() - started_s < 2
        assert losses == [], "a connection that was closed on purpose is no loss"

    with_executor(body)


def test_heartbeats_are_recorded_as_progress() -> None:
    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        connect(executor)
        before = executor.progress.value
        executor.submit(row_plan(1, 1)).result(5)
        assert executor.progress.value > before
        assert time.monotonic_ns() - executor.progress.changed_ns < 2e9

    with_executor(body, Script(step_s=0.3, heartbeat_s=0.05))


def test_progress_changes_only_with_the_value() -> None:
    progress = Progress()
    progress.note(4)
    changed_ns = progress.changed_ns
    progress.note(4)
    assert progress.changed_ns == changed_ns
    progress.note(5)
    assert progress.changed_ns > changed_ns


def test_a_load_that_takes_too_long_names_its_stage() -> None:
    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        executor.handshake()
        executor.load_timeout_s = 0.3
        with pytest.raises(DeadlineExceededError, match=r"reading weights \(25 %\)"):
            executor.load_model(ModelSpec())

    with_executor(body, Script(load_s=5))


def test_a_worker_of_another_version_or_of_a_group_is_refused() -> None:
    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        worker.servicer.world_size = 2
        with pytest.raises(FailedPreconditionError, match="2 ranks"):
            executor.handshake()
        worker.servicer.versions = types_pb2.ProtocolVersions(min=2, max=3)
        with pytest.raises(FailedPreconditionError, match="minor versions 2 to 3"):
            executor.handshake()

    with_executor(body)


def test_a_damaged_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(files: Any) -> Any:
        yield types_pb2.TokenizerChunk(name="tokenizer.json", data=b"{}", is_last=True, sha256="0" * 64)

    monkeypatch.setattr("tests.core_edge.worker_server.tokenizer_chunks", chunks)

    def body(executor: GrpcExecutor, worker: ScriptedWorker, losses: list[PagewireError]) -> None:
        executor.handshake()
        with pytest.raises(InternalError, match="sha256"):
            executor.tokenizer_files()

    with_executor(body)


def test_a_loss_found_by_a_command_is_reported() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        address = await worker.start()
        losses: list[PagewireError] = []
        executor = GrpcExecutor(address, "core-1", on_lost=losses.append)
        await asyncio.to_thread(connect, executor)
        await worker.stop()
        await eventually(lambda: len(losses) == 1)
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(executor.sleep, 1)
        assert len(losses) == 2
        executor.shutdown()

    asyncio.run(run())
