"""Fixtures of the worker's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker.mini_core import MiniCore
from tests.worker.tiny_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyModel
from tests.worker.worker_support import Client, ServerThread, write_tiny_model
from worker_svc.batch import Batch
from worker_svc.kv_pool import allocate_pool
from worker_svc.runner import ModelRunner

NUM_BLOCKS, BLOCK_SIZE = 200, 4


def make_runner(
    *, max_num_seqs: int = 64, max_num_batched_tokens: int = 4096, num_blocks: int = NUM_BLOCKS, **changes: Any
) -> ModelRunner:
    """A runner on the tiny model; changes go to ModelRunner."""
    model = TinyModel()
    pool = allocate_pool(
        model.kv_cache_specs(),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        memory_bytes=0,
        dtype="float32",
        device=torch.device("cpu"),
        most_blocks=10**6,
    )
    batch = Batch(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
    )
    return ModelRunner(model, pool, batch, **changes)


@pytest.fixture
def runner() -> ModelRunner:
    return make_runner()


@pytest.fixture
def core(runner: ModelRunner) -> MiniCore:
    return MiniCore(runner.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture
def new_core():
    """Makes further cores, each on a runner of its own."""
    return lambda: MiniCore(make_runner().execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def server():
    server = ServerThread()
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = Client(server.address)
    yield client
    client.close()


@pytest.fixture
def loaded(client, tiny):
    """A client whose worker has a model and a pool of epoch 1."""
    client.handshake()
    client.load(tiny, load_format="dummy")
    client.initialize_cache()
    return client
