"""Decode steps run as recorded programs: where they can, on the inputs of each step, and with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker_svc import decode_programs
from worker_svc.decode_programs import DecodePrograms
from worker_svc.kv_pool import KvPool, allocate_pool
from worker_svc.models.interface import ForwardBatch, Model
from worker_svc.models.loader import load_model

BLOCK_SIZE, MAX_ROWS = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    path = str(tmp_path_factory.mktemp("programs") / "llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def pool_of(model: Model) -> KvPool:
    pool = allocate_pool(
        model.kv_cache_specs(), block_size=BLOCK_SIZE, num_blocks=32, memory_bytes=0, dtype="float32",
        device=torch.device("cpu"), most_blocks=32,
    )  # fmt: skip
    for number, cache in enumerate(cache for pair in list.__iter__(pool.caches) for cache in pair):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(number)))
    return pool


class Inputs:
    """A step's inputs, in the same memory step after step."""

    def __init__(self) -> None:
        self._tables = torch.arange(1, 1 + 4 * MAX_ROWS, dtype=torch.int32).view(MAX_ROWS, 4)
        self._ids, self._positions, self._slots = (torch.zeros(MAX_ROWS, dtype=torch.int64) for _ in range(3))
        self._starts = torch.arange(MAX_ROWS + 1, dtype=torch.int32)
        self._lens = torch.zeros(MAX_ROWS, dtype=torch.int32)

    def step(self, num_rows: int, position: int) -> ForwardBatch:
        rows = slice(0, num_rows)
        self._ids[rows] = torch.arange(num_rows) * 7 + position
        self._positions[rows] = torch.arange(num_rows) % 2 + position
        self._lens[rows] = self._positions[rows].to(torch.int32) + 1
        blocks = self._tables[torch.arange(num_rows), self._positions[rows] // BLOCK_SIZE]
        self._slots[rows] = blocks * BLOCK_SIZE + self._positions[rows] % BLOCK_SIZE
        return ForwardBatch(
            self._ids[rows], self._positions[rows], self._starts[: num_rows + 1], self._lens[rows],
            self._tables[rows, : position // BLOCK_SIZE + 1], self._slots[rows], 1, position + 2,
        )  # fmt: skip


def test_steps_have_the_bits_of_the_model_and_programs_are_used_again(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder, dtype="float32", device="cpu").model
    pools, inputs = [pool_of(model), pool_of(model)], Inputs()
    calls: list[int] = []
    forward = model.forward
    programs = DecodePrograms(model, pools[0].caches)

    def counted(batch: ForwardBatch, caches: object) -> torch.Tensor:
        calls.append(len(batch.seq_lens))
        return forward(batch, caches)

    monkeypatch.setattr(model, "forward", counted)
    with torch.inference_mode():
        for position in range(14):
            for num_rows in (1, 5, 2):
                batch = inputs.step(num_rows, position)
                expected = forward(batch, pools[1].caches)
                assert torch.equal(programs(batch), expected), (position, num_rows)
    assert calls == [1, 5, 2], "each number of rows is recorded once"
    for mine, others in zip(list.__iter__(pools[0].caches), list.__iter__(pools[1].caches), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def test_inputs_that_have_moved_are_recorded_anew(folder: str) -> None:
    model = load_model(folder, dtype="float32", device="cpu").model
    pool, inputs = pool_of(model), Inputs()
    programs = DecodePrograms(model, pool.caches)
    with torch.inference_mode():
        programs(inputs.step(3, 5))
        batch = inputs.step(3, 6)
        expected = model.forward(batch, pool.caches)
        names = "input_ids", "positions", "query_start_loc", "seq_lens", "block_tables", "slot_mapping"
        moved = replace(batch, **{name: getattr(batch, name).clone() for name in names})
        inputs.step(3, 9)  # what the first program would read
        assert torch.equal(programs(moved), expected)
        assert torch.equal(programs(inputs.step(3, 6)), expected)


@pytest.mark.parametrize("why", ["chunk", "many rows", "generic"])
def test_other_steps_run_by_python(folder: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, dtype="float32", device="cpu", force_generic=why == "generic").model
    pool, batch = pool_of(model), Inputs().step(4, 5)
    if why == "chunk":
        starts = torch.tensor([0, 4], dtype=torch.int32)
        slots = batch.block_tables[0, 1:2] * BLOCK_SIZE + torch.arange(4)
        batch = ForwardBatch(
            batch.input_ids, torch.arange(4, 8), starts, torch.tensor([8], dtype=torch.int32),
            batch.block_tables[:1], slots, 4, 8,
        )  # fmt: skip
    elif why == "many rows":
        monkeypatch.setattr(decode_programs, "MAX_ROWS", 3)
    programs = DecodePrograms(model, pool.caches)
    with torch.inference_mode():
        expected = model.forward(batch, pool.caches)
        for _ in range(2):
            assert torch.equal(programs(batch), expected)
    assert not programs.num_recorded
