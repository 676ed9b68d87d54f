"""Ids of blocks that are copied or filled cross to a device as a step's inputs do, not by a copy that waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels
from pagewire.columns import int32
from tests.worker.device_core import device_core, runner_of
from tests.worker.mini_core import request
from worker_svc.block_moves import BlockMoves
from worker_svc.staging import Staging

BLOCK = 4


def numbered(num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Caches of two layers whose blocks hold their own numbers."""
    values = torch.arange(num_blocks, dtype=torch.float32)[:, None, None, None].expand(num_blocks, BLOCK, 1, 2)
    return [(values.clone(), values + 1000) for _ in range(2)]


@pytest.mark.parametrize("is_staged", [True, False])
def test_copies_read_what_was_before_and_zeros_come_last(is_staged) -> None:
    caches = numbered(9)
    moves = BlockMoves(caches, torch.device("cpu"), is_staged=is_staged)
    moves.run(int32([1, 2, 3]), int32([2, 3, 4]), int32([4, 6]))
    moves.run(int32([]), int32([]), int32([7]))
    moves.run(int32([8]), int32([7]), int32([]))
    for keys, values in caches:
        assert keys[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 0, 5, 0, 8, 8]
        assert values[:, 0, 0, 0].tolist() == [1000, 1001, 1001, 1002, 0, 1005, 0, 1008, 1008]


def test_more_ids_than_ever_before_find_room() -> None:
    caches = numbered(3000)
    moves = BlockMoves(caches, torch.device("cpu"), is_staged=True)
    for count in (10, 1100, 1500):
        moves.run(int32([]), int32([]), int32(np.arange(1, count)))
    assert torch.count_nonzero(caches[1][0][:, 0, 0, 0]) == 3000 - 1500


def test_a_step_on_a_device_stages_them(monkeypatch) -> None:
    core, staged, used = device_core(), [], []
    stage, zero_blocks, copy_blocks = Staging.stage, kernels.zero_blocks, kernels.copy_blocks

    def watched(self, arrays):
        tensors = stage(self, arrays)
        staged.extend(tensor.data_ptr() for tensor in tensors)
        return tensors

    monkeypatch.setattr(Staging, "stage", watched)
    monkeypatch.setattr(kernels, "zero_blocks", lambda k, v, ids: used.append(ids.data_ptr()) or zero_blocks(k, v, ids))
    monkeypatch.setattr(
        kernels, "copy_blocks", lambda k, v, *ids: used.extend(x.data_ptr() for x in ids) or copy_blocks(k, v, *ids)
    )
    runner = runner_of(core)
    key_cache = list.__getitem__(runner.pool.caches, 0)[0]
    key_cache[50], key_cache[60] = 3.0, 4.0
    plan = core.plan([(request([5, 6]), 2)])
    plan.copy_sources, plan.copy_destinations, plan.zero_block_ids = int32([50]), int32([51]), int32([60])
    core.execute(plan).finish()
    assert bool((key_cache[51] == 3.0).all()) and not bool(key_cache[60].any())
    assert len(used) == 3 * len(runner.pool.caches) and set(used) <= set(staged)
