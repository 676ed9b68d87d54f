"""What the KV pool of a GPU may take, and devices that are not there."""

from __future__ import annotations

import pytest
import torch

from pagewire.errors import InvalidArgumentError, UnimplementedError
from pagewire.runtime.settings import parse_settings
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.tiny_model import MAX_MODEL_LEN, TinyModel
from worker_svc.kv_pool import allocate_pool
from worker_svc.memory import device_named
from worker_svc.models.interface import KvCacheSpec
from worker_svc.profile_run import GRAPH_BYTES, kv_budget_bytes, run_largest_step
from worker_svc.settings import WorkerSettings
from worker_svc.worker import Worker

GIB = 2**30


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(50, 7), (8, 8), (500, 2), (3, 64)])
def test_the_largest_step_has_all_rows_and_tokens(num_tokens: int, num_rows: int) -> None:
    model, seen = TinyModel(), []
    forward = model.forward

    def watched(batch, caches):
        before = [cache.clone() for pair in caches for cache in pair]
        hidden = forward(batch, caches)
        assert all(torch.equal(a, b) for a, b in zip(before, (c for pair in caches for c in pair), strict=True))
        seen.append((len(batch.input_ids), len(batch.seq_lens), int(batch.positions.max())))
        return hidden

    model.forward = watched
    ids = run_largest_step(
        model, max_num_batched_tokens=num_tokens, max_num_seqs=num_rows, max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    rows = min(num_rows, num_tokens)
    ((tokens, got_rows, last),) = seen
    assert (tokens, got_rows) == (min(num_tokens, rows * MAX_MODEL_LEN), rows) and last < MAX_MODEL_LEN
    assert ids.shape == (rows,)


def test_the_budget_is_the_share_less_what_is_used_and_what_a_step_takes() -> None:
    budget = kv_budget_bytes(total=100 * GIB, free=70 * GIB, step_bytes=5 * GIB, utilization=0.9)
    assert budget == 90 * GIB - 30 * GIB - 5 * GIB - GRAPH_BYTES
    with pytest.raises(InvalidArgumentError, match=r"gpu_memory_utilization.*0\.3.*leaves nothing.*lower max_num"):
        kv_budget_bytes(total=100 * GIB, free=70 * GIB, step_bytes=5 * GIB, utilization=0.3)


def test_8_bit_kv_is_for_devices() -> None:
    sizes = {"block_size": 4, "num_blocks": 3, "memory_bytes": 0, "most_blocks": 9}
    with pytest.raises(UnimplementedError, match="'fp8_e4m3' is not served on cpu: float32, bfloat16, float16 are"):
        allocate_pool([KvCacheSpec(2, 16)], dtype="fp8_e4m3", device=torch.device("cpu"), **sizes)
    pool = allocate_pool([KvCacheSpec(2, 16)], dtype="fp8_e4m3", device=torch.device("meta"), **sizes)
    assert pool.bytes_per_block == 2 * 4 * 2 * 16


def test_devices_that_are_not_there_are_named() -> None:
    assert device_named("cpu") == torch.device("cpu")
    with pytest.raises(InvalidArgumentError, match="must be cpu, cuda or cuda:<index>"):
        Worker(device="gpu")
    beyond = f"cuda:{torch.cuda.device_count() if torch.cuda.is_available() else 0}"
    with pytest.raises(InvalidArgumentError, match=rf"device.*{beyond}.*sees \d+ CUDA devices"):
        Worker(device=beyond)
    with pytest.raises(InvalidArgumentError, match=r"gpu_memory_utilization.*1\.5.*\(0, 1\]"):
        Worker(gpu_memory_utilization=1.5)


def test_flags_of_a_worker() -> None:
    settings = parse_settings(WorkerSettings, "worker", ["--no-cuda-graphs", "--gpu-memory-utilization=0.5"])
    assert (settings.cuda_graphs, settings.gpu_memory_utilization) == (False, 0.5)
    defaults = parse_settings(WorkerSettings, "worker", [])
    assert (defaults.cuda_graphs, defaults.gpu_memory_utilization) == (True, 0.9)
