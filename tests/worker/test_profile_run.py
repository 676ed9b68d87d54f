"""What the KV pool of a GPU may take, and devices that are not there."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pagewire.errors import InvalidArgumentError, UnimplementedError
from pagewire.runtime.settings import parse_settings
from pagewire.sampling import SamplingParams
from pagewire.types_wire import dtype_from_proto, dtype_to_proto
from tests.worker.conftest import BLOCK_SIZE, make_runner
from tests.worker.device_core import PENALIZED
from tests.worker.mini_core import MiniCore, request
from tests.worker.tiny_model import MAX_MODEL_LEN, TinyModel
from worker_svc.compute import Deferred
from worker_svc.kv_pool import DEVICE_DTYPES, allocate_pool
from worker_svc.memory import device_named
from worker_svc.models.interface import KvCacheSpec
from worker_svc.profile_run import GRAPH_BYTES, kv_budget_bytes, run_largest_step
from worker_svc.sampler import LOGITS_SLICE
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
        block_size=BLOCK_SIZE, kv_dtype=torch.float32,
    )  # fmt: skip
    rows = min(num_rows, num_tokens)
    ((tokens, got_rows, last),) = seen
    assert (tokens, got_rows) == (min(num_tokens, rows * MAX_MODEL_LEN), rows) and last < MAX_MODEL_LEN
    assert len(ids) == max(1, min(tokens, max(num_rows, LOGITS_SLICE)) - 1)


class Peak(TorchFunctionMode):
    """Most bytes of tensors as wide as logits that exist at the same time; one storage counts once."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.most, self._live = vocab_size, 0, dict[int, Any]()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[1:] == (self.vocab_size,):
            storage = result.untyped_storage()
            self._live[storage._cdata] = weakref.ref(result), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if entry[0]() is not None}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("kind", ["drafts", "processors beside noise", "log-probabilities beside none"])
def test_no_step_has_more_logits_than_the_largest_one(kind) -> None:
    num_rows, sizes = 70, {"max_num_seqs": 70, "max_num_batched_tokens": 1000}
    params = {
        "drafts": SamplingParams(temperature=0.9, seed=1),
        "processors beside noise": SamplingParams(temperature=0.9, seed=1, frequency_penalty=0.5),
        "log-probabilities beside none": SamplingParams(temperature=0.0, logprobs=20),
    }[kind]
    runner = make_runner(is_device=True, num_blocks=400, **sizes)
    core = MiniCore(runner.start, num_blocks=400, block_size=BLOCK_SIZE)
    core.free_slots = list(range(num_rows))
    live = [request([5, 6, 7], params) for _ in range(num_rows - 1)] + [request([5, 6, 7], PENALIZED)]
    if kind == "drafts":
        live[-1] = request([5, 6, 7])
    drafts = [3] * 9 if kind == "drafts" else []
    plan = core.plan([(req, 3 + len(drafts), drafts) if drafts else (req, 3) for req in live])
    with Peak(runner.model.vocab_size) as step:
        started = core.execute(plan)
        result = started.finish() if isinstance(started, Deferred) else started
    assert len(result.slots) == num_rows and not result.errors
    with Peak(runner.model.vocab_size) as largest, torch.inference_mode():
        run_largest_step(
            runner.model, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, kv_dtype=torch.float32, **sizes
        )
    row_bytes = runner.model.vocab_size * 4
    assert num_rows * row_bytes <= step.most <= largest.most


def test_the_budget_is_the_share_less_what_is_used_and_what_a_step_takes() -> None:
    budget = kv_budget_bytes(total=100 * GIB, free=70 * GIB, step_bytes=5 * GIB, utilization=0.9)
    assert budget == 90 * GIB - 30 * GIB - 5 * GIB - GRAPH_BYTES
    with pytest.raises(InvalidArgumentError, match=r"gpu_memory_utilization.*0\.3.*leaves nothing.*lower max_num"):
        kv_budget_bytes(total=100 * GIB, free=70 * GIB, step_bytes=5 * GIB, utilization=0.3)


def test_8_bit_kv_is_for_devices() -> None:
    sizes = {"block_size": 4, "num_blocks": 3, "memory_bytes": 0, "most_blocks": 9}
    with pytest.raises(UnimplementedError, match="'float8_e4m3' is not served on cpu: float32, bfloat16, float16 are"):
        allocate_pool([KvCacheSpec(2, 16)], dtype="float8_e4m3", device=torch.device("cpu"), **sizes)
    pool = allocate_pool([KvCacheSpec(2, 16)], dtype="float8_e4m3", device=torch.device("meta"), **sizes)
    assert pool.bytes_per_block == 2 * 4 * 2 * 16


def test_the_wire_knows_every_type_of_a_cache() -> None:
    for name in DEVICE_DTYPES:
        assert dtype_from_proto(dtype_to_proto(name)) == name


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
