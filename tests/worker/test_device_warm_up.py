"""What a GPU compiles before it serves: every form of attention's kernel that a step may need."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

import kernels
from kernels.cuda.tiles import Device, Shape, Tiles, tiles
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.tiny_model import MAX_MODEL_LEN, TinyModel
from worker_svc.device_warm_up import warm_up_device
from worker_svc.kv_pool import allocate_pool
from worker_svc.models.interface import ForwardBatch, KvCaches

H200, L4, A100 = Device(90, 132), Device(89, 58), Device(80, 108)
SHAPES = {
    "llama 8b": (Shape(128, 128, 4, 2, 2), 8, H200),
    "fp8 cache": (Shape(128, 128, 4, 2, 1), 8, H200),
    "qwen 7b": (Shape(128, 128, 7, 2, 2), 4, L4),
    "small": (Shape(64, 64, 3, 2, 2), 3, A100),
    "groups of 4": (Shape(64, 64, 4, 2, 2), 8, H200),
    "one head each": (Shape(256, 256, 1, 2, 2), 4, A100),
    "one kv head": (Shape(64, 64, 71, 2, 2), 1, H200),
    "float32": (Shape(64, 64, 2, 4, 4), 2, L4),
}
SIZES = {
    "long": (8192, 256, 32768, 16),
    "short": (512, 8, 700, 16),
    "one row": (300, 1, 5000, 32),
    "tiny": (2, 2, 40, 16),
}


class Watched:
    """In place of a model: keeps the shapes of its batches, and of its logits."""

    device, vocab_size = torch.device("cpu"), 40

    def __init__(self) -> None:
        self.shapes: set[tuple[int, int, int]] = set()
        self.num_logits: list[int] = []

    def forward(self, batch: ForwardBatch, caches: KvCaches) -> torch.Tensor:
        assert int(batch.slot_mapping.max()) < 0 and not bool(batch.block_tables.any()), "KV of nobody is touched"
        assert int(batch.query_start_loc[-1]) == len(batch.input_ids) == len(batch.positions)
        self.shapes.add((len(batch.input_ids), *batch.block_tables.shape))
        return torch.zeros(len(batch.input_ids), 3)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logits.append(len(hidden))
        return torch.zeros(len(hidden), self.vocab_size)


def possible(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int):
    """(tokens, rows, width) of steps: any mix gives the same form as one of these totals."""
    rows = sorted({1, 2, 3, 4, 8, 17, 33, 64, 128, 256} & set(range(1, max_num_seqs + 1)))
    widths = sorted({1, 7, 8, 9, 16, 31, 64, 100, 128, 255, 256, 511, 512, 1000, 1024, 2047})
    most = -(-max_model_len // block_size)
    per_row = [*range(1, 10), *range(10, 36, 3), 43, 64, 65, 100, 127, 128, 129, 200, 1000, 8000]
    for num_rows, width in itertools.product(rows, [*(w for w in widths if w < most), most]):
        longest = min(width * block_size, max_model_len)
        for num_tokens in {n * num_rows + extra for n in per_row for extra in (0, 1, num_rows // 2)}:
            if num_rows <= num_tokens <= min(max_num_batched_tokens, num_rows * longest):
                yield num_tokens, num_rows, width


def cut(shape: Shape, num_kv_heads: int, device: Device, batch: tuple[int, int, int], block_size: int) -> Tiles:
    num_tokens, num_rows, width = batch
    return tiles(shape, device, num_tokens, num_rows, num_kv_heads, width * block_size)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_form_of_attention_has_run(sizes) -> None:
    names = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size")
    model, wanted = Watched(), list(possible(*sizes))
    warm_up_device(model, [], **dict(zip(names, sizes, strict=True)))
    for name, (shape, num_kv_heads, device) in SHAPES.items():
        have = {cut(shape, num_kv_heads, device, batch, sizes[3]) for batch in model.shapes}
        need = {cut(shape, num_kv_heads, device, batch, sizes[3]): batch for batch in wanted}
        missing = {form: batch for form, batch in need.items() if form not in have}
        assert not missing, f"{name}: {missing}"
    assert {1, sizes[1]} <= set(model.num_logits)
    assert len(model.shapes) < 120


def test_no_kv_changes_and_every_operation_of_a_step_runs(monkeypatch, caplog) -> None:
    model, called = TinyModel(), set()
    pool = allocate_pool(
        model.kv_cache_specs(), block_size=BLOCK_SIZE, num_blocks=5, memory_bytes=0, dtype="float32",
        device=torch.device("cpu"), most_blocks=5,
    )  # fmt: skip
    caches = [cache for pair in list.__iter__(pool.caches) for cache in pair]
    for cache in caches:
        cache[1:] = 7.0
    names = (
        "paged_attention", "write_kv", "argmax", "sample", "gather_logprobs", "verify_drafts", "copy_blocks",
        "zero_blocks",
    )  # fmt: skip
    for name in names:
        operation = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, n=name, f=operation, **k: called.add(n) or f(*a, **k))
    with caplog.at_level(logging.INFO):
        warm_up_device(
            model, pool.caches, max_num_batched_tokens=50, max_num_seqs=6, max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
    assert called == set(names)
    assert all(bool((cache[1:] == 7.0).all()) for cache in caches)
    assert "forward passes in" in caplog.text
