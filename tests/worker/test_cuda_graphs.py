"""Padded decode batches: which size, what the padding changes, and when Python runs the model after all."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from tests.worker.calls_again import CallsAgain
from tests.worker.conftest import BLOCK_SIZE, make_runner
from tests.worker.device_core import SAMPLED
from tests.worker.mini_core import GREEDY, MiniCore, request
from tests.worker.tiny_model import MAX_MODEL_LEN, TinyModel
from worker_svc.cuda_graphs import MAX_ROWS, DecodeGraphs, padded_sizes
from worker_svc.kv_pool import KvPool, allocate_pool
from worker_svc.models.interface import ForwardBatch

NUM_BLOCKS = 40


class CannotRecord:
    """What capturing a model that waits for the device does."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


def pool_of(model: TinyModel) -> KvPool:
    pool = allocate_pool(
        model.kv_cache_specs(), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, memory_bytes=0, dtype="float32",
        device=torch.device("cpu"), most_blocks=NUM_BLOCKS,
    )  # fmt: skip
    for number, cache in enumerate(caches_of(pool)):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(number)))
    return pool


def caches_of(pool: KvPool) -> list[torch.Tensor]:
    return [cache for pair in list.__iter__(pool.caches) for cache in pair]


def decodes(positions: list[int], first_block: int = 1) -> ForwardBatch:
    """One token per row; every row has four blocks of its own, of which it uses what its position needs."""
    rows = torch.arange(len(positions))
    places = torch.tensor(positions)
    tables = (first_block + rows[:, None] * 4 + torch.arange(4)).int()
    width = max(positions) // BLOCK_SIZE + 1
    return ForwardBatch(
        input_ids=rows * 7 + places, positions=places, query_start_loc=torch.arange(len(rows) + 1).int(),
        seq_lens=places.int() + 1, block_tables=tables[:, :width],
        slot_mapping=tables[rows, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE,
        max_query_len=1, max_seq_len=max(positions) + 1,
    )  # fmt: skip


def graphs_of(model: TinyModel, pool: KvPool, recorder: CallsAgain | CannotRecord, max_num_seqs: int = 9):
    return DecodeGraphs(
        model, pool.caches, max_num_seqs=max_num_seqs, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE,
        recorder=recorder,
    )  # fmt: skip


def test_sizes() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(3) == [1, 2, 3]
    assert padded_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert padded_sizes(100)[-3:] == [88, 96, 100]
    for most in (256, 300, MAX_ROWS, 5000):
        sizes = padded_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, MAX_ROWS)
        gaps = [b - a for a, b in pairwise(sizes)]
        assert max(gaps) == (16 if most > 264 else 8)


def test_padded_steps_have_the_outputs_and_the_caches_of_unpadded_ones() -> None:
    model, recorder = TinyModel(), CallsAgain()
    padded, plain = pool_of(model), pool_of(model)
    graphs = graphs_of(model, padded, recorder)
    # Long tables first, so that later steps find other rows' blocks in the static buffers behind their own.
    for positions in ([15] * 9, [3, 7, 0, 12, 5], [4], [5, 1, 9], [8, 2], [0] * 7, [6, 13, 1, 10, 6]):
        batch = decodes(positions)
        got = graphs(batch)
        assert torch.equal(got, model.forward(batch, plain.caches)), positions
        assert got.shape[0] == len(positions)
    for a, b in zip(caches_of(padded), caches_of(plain), strict=True):
        assert torch.equal(a, b), "padding wrote KV"
    assert recorder.sizes == [9, 8, 1, 4, 2] and recorder.num_replays == 7


def test_capturing_ahead_changes_no_kv_and_is_used(caplog) -> None:
    model, recorder = TinyModel(), CallsAgain()
    pool = pool_of(model)
    graphs = graphs_of(model, pool, recorder)
    graphs(decodes([15] * 9))  # leaves slots and lengths in the static buffers
    before = [cache.clone() for cache in caches_of(pool)]
    with caplog.at_level(logging.INFO):
        graphs.capture_all()
    assert re.search(r"captured CUDA graphs for 1, 2, 4, 8, 9 rows in \d+\.\d s", caplog.text)
    assert all(torch.equal(a, b) for a, b in zip(caches_of(pool), before, strict=True))
    assert recorder.sizes == [9, 8, 4, 2, 1] and graphs.num_recorded == 5
    graphs(decodes([3, 3, 3]))
    assert recorder.sizes == [9, 8, 4, 2, 1] and recorder.num_replays == 2


@pytest.mark.parametrize("why", ["chunk", "more rows than the largest graph", "not capturable"])
def test_other_steps_run_by_python(why: str) -> None:
    model, recorder = TinyModel(), CannotRecord() if why == "not capturable" else CallsAgain()
    pool, plain = pool_of(model), pool_of(model)
    batch = decodes([5, 9, 2])
    if why == "chunk":
        batch = ForwardBatch(
            torch.arange(3), torch.arange(4, 7), torch.tensor([0, 3]).int(), torch.tensor([7]).int(),
            batch.block_tables[:1], BLOCK_SIZE * 2 + torch.arange(3), 3, 7,
        )  # fmt: skip
    graphs = graphs_of(model, pool, recorder, 2 if why.startswith("more") else 9)
    for _ in range(2):
        assert torch.equal(graphs(batch), model.forward(batch, plain.caches))
    assert not graphs.num_recorded


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_worker_on_graphs_samples_what_it_samples_without(params) -> None:
    prompts = [[5, 17, 3, 88, 41], [9, 2], [60, 33, 71, 12], [28, 7, 7], [3]]
    outputs, recorder = [], CallsAgain()
    for changes in ({}, {"is_device": True, "recorder": recorder}):
        core = MiniCore(make_runner(**changes).execute, num_blocks=200, block_size=BLOCK_SIZE)
        requests = [request(prompt, params, child_index=i) for i, prompt in enumerate(prompts)]
        first = core.generate(requests[:2], 3)
        outputs.append([*first, *core.generate(requests, 9, budget=6)])
    assert outputs[0] == outputs[1]
    assert recorder.num_replays > 5
