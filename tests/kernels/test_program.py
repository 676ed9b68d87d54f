"""Recorded programs: the bits of the calls one by one, on inputs that changed; what can not run again is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from kernel_cases import randn

import kernels
from kernels.cpu.program import Arena, NotRecordableError, Program, record
from kernels.cpu.recorder import empty, is_recording
from kernels.float_weight import FloatWeight
from kernels.kv_layout import cache_shapes
from kernels.quantized import ChannelWeight, GroupedWeight

SIZE, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_ROWS = 96, 32, 3, 1, 16, 3
DTYPE = torch.bfloat16
NewWeight = Callable[..., FloatWeight | ChannelWeight | GroupedWeight]


class Layer:
    """A layer of a decoder on inputs at fixed places."""

    def __init__(self, new_weight: NewWeight) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.tensor([3, 7, 11])
        self.positions = torch.tensor([4, 20, 31])
        self.seq_lens = (self.positions + 1).to(torch.int32)
        self.query_start_loc = torch.arange(NUM_ROWS + 1, dtype=torch.int32)
        self.block_tables = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
        self.slots = torch.empty(NUM_ROWS, dtype=torch.int64)
        self.advance(0)
        shapes = cache_shapes(7, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype=DTYPE, device=torch.device("cpu"))
        self.caches = [randn(generator, *shape, dtype=DTYPE) for shape in shapes]
        self.norm = randn(generator, SIZE, dtype=DTYPE)
        angles = torch.arange(64)[:, None] * torch.logspace(0, -3, HEAD_SIZE // 2)
        self.tables = angles.cos(), angles.sin()

        def weight(sizes: list[int], in_features: int, is_gated: bool = False) -> object:
            made = new_weight(sizes, in_features, DTYPE, is_gated)
            made.fill(randn(generator, sum(sizes), in_features, dtype=DTYPE) / in_features**0.5)
            return made

        self.embedding = weight([32], SIZE)
        self.qkv = weight([SIZE, HEAD_SIZE, HEAD_SIZE], SIZE)
        self.output, self.gate_up, self.down = weight([SIZE], SIZE), weight([128, 128], SIZE, True), weight([SIZE], 128)

    def advance(self, by: int) -> None:
        """Other inputs, at the same places."""
        self.ids += by
        self.positions -= by
        self.seq_lens -= by
        at = self.block_tables[torch.arange(NUM_ROWS), self.positions // BLOCK_SIZE]
        self.slots.copy_(at * BLOCK_SIZE + self.positions % BLOCK_SIZE)

    def forward(self) -> torch.Tensor:
        hidden = kernels.embedding(self.ids, self.embedding)
        hidden, residual = kernels.rms_norm(hidden, self.norm, 1e-5)
        query = kernels.rotate_and_write_kv(
            kernels.linear(hidden, self.qkv), self.positions, self.tables, *self.caches, self.slots, HEAD_SIZE
        )
        attended = kernels.paged_attention(
            query, *self.caches, self.query_start_loc, self.seq_lens, self.block_tables, HEAD_SIZE**-0.5
        )
        hidden, residual = kernels.rms_norm(kernels.linear(attended.flatten(1), self.output), self.norm, 1e-5, residual)
        return kernels.linear(kernels.gated_linear(hidden, self.gate_up), self.down)


@pytest.mark.parametrize("new_weight", [FloatWeight, ChannelWeight, GroupedWeight])
def test_a_program_gives_the_bits_of_its_calls(new_weight: NewWeight) -> None:
    layer = Layer(new_weight)
    expected = layer.forward()
    program = record(Arena(), layer.forward)
    assert torch.equal(program.output, expected)
    for _ in range(3):
        layer.advance(1)
        caches = [cache.clone() for cache in layer.caches]
        expected = layer.forward()
        for cache, before in zip(layer.caches, caches, strict=True):
            cache.copy_(before)
        assert program.run() is program.output
        assert torch.equal(program.output, expected)
        assert any(not torch.equal(cache, before) for cache, before in zip(layer.caches, caches, strict=True))


def test_programs_share_an_arena_and_do_not_disturb_each_other() -> None:
    arena, layers = Arena(), [Layer(FloatWeight), Layer(FloatWeight)]
    layers[1].advance(2)
    expected = [layer.forward() for layer in layers]
    programs: list[Program] = []
    for layer in layers:
        programs.append(record(arena, layer.forward))
        if len(programs) == 1:
            first_bytes = arena.num_bytes
    # Only the output of a program, a piece of the smallest size, outlives it.
    assert arena.num_bytes - first_bytes <= 4096
    for _ in range(2):
        for program, tensor in zip(programs, expected, strict=True):
            assert torch.equal(program.run(), tensor)


def test_an_arena_gives_a_piece_again_when_no_view_is_left() -> None:
    arena = Arena()
    first = arena.empty((10, 10), torch.float32)
    address, view = first.data_ptr(), first[3:].flatten()
    del first
    gc.collect()
    other = arena.empty((10, 10), torch.float32)
    assert other.data_ptr() != address
    del view
    gc.collect()
    assert arena.empty((7,), torch.int64).data_ptr() == address
    assert arena.empty((5000,), torch.float32).data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.t().contiguous(),
        lambda x: torch.empty_like(x),
        lambda x: x.float(),
        lambda x: kernels.linear(x[:, :95].contiguous(), Layer(FloatWeight).output),
    ],
    ids=["sum", "in-place", "copy", "memory", "cast", "weights"],
)
def test_what_would_not_run_again_is_refused(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 96, dtype=DTYPE)
    with pytest.raises(NotRecordableError, match="torch computes aten"):
        record(Arena(), lambda: compute(x))
    assert not is_recording()


def test_views_and_casts_to_the_same_type_are_recorded() -> None:
    layer = Layer(FloatWeight)
    x = torch.randn(4, SIZE).to(DTYPE)
    program = record(Arena(), lambda: kernels.linear(x[1:3].to(DTYPE).contiguous(), layer.output).flatten())
    assert program.num_calls == 1
    x.mul_(2)
    assert torch.equal(program.run(), kernels.linear(x[1:3], layer.output).flatten())


def test_an_error_ends_the_recording() -> None:
    def fail() -> torch.Tensor:
        assert is_recording()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        record(Arena(), fail)
    assert not is_recording()
    assert empty((3,), torch.float32).shape == (3,)
