"""The forward pass of decode steps as recorded programs of kernel calls (kernels/cpu/program.py).

A step in which every request has one token does the same calls on the same memory as the last one with as many
requests. Processor time of one thread for a forward pass of SmolLM2-135M, by Python and as a program, the least of 40:
21.5 and 15.8 ms for 1 request in bfloat16, 26.1 and 18.7 ms for 8; 13.5 and 7.1 ms for 1 in int8, 16.8 and 10.9 for 8.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from kernels.cpu import jit
from kernels.dispatch import is_interpreting
from worker_svc.models.interface import ForwardBatch, KvCaches, Model

if TYPE_CHECKING:
    from kernels.cpu.program import Arena, Program

logger = logging.getLogger(__name__)
MAX_ROWS = 256
"""More rows than that leave Python's part of a step small."""


class DecodePrograms:
    """Runs a model's forward pass; a program of it where there is one for this number of rows, or can be.

    Belongs to the compute thread. Programs hold addresses of the caches and of the batch's inputs: the caches must
    live as long, and a program whose inputs have moved is recorded anew.
    """

    def __init__(self, model: Model, caches: KvCaches) -> None:
        self._model, self._caches = model, caches
        self._can_record = model.device.type == "cpu" and not is_interpreting() and jit.unavailable() is None
        self._arena: Arena | None = None
        self._programs: dict[int, tuple[tuple[int, ...], Program]] = {}

    @property
    def num_recorded(self) -> int:
        """Numbers of rows that have a program."""
        return len(self._programs)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size], valid until the next call; see Model.forward."""
        num_rows = len(batch.seq_lens)
        if not self._can_record or num_rows != len(batch.input_ids) or num_rows > MAX_ROWS:
            return self._model.forward(batch, self._caches)
        inputs = _addresses(batch)
        found = self._programs.get(num_rows)
        if found is not None and found[0] == inputs:
            return found[1].run()
        return self._record(batch, inputs)

    def _record(self, batch: ForwardBatch, inputs: tuple[int, ...]) -> torch.Tensor:
        from kernels.cpu.program import Arena, NotRecordableError, record

        self._arena = self._arena or Arena()
        try:
            program = record(self._arena, lambda: self._model.forward(batch, self._caches))
        except NotRecordableError as error:
            logger.info("decode steps are not recorded: %s", error)
            self._can_record, self._programs = False, {}
            return self._model.forward(batch, self._caches)
        self._programs[len(batch.seq_lens)] = inputs, program
        return program.output


def _addresses(batch: ForwardBatch) -> tuple[int, ...]:
    tensors = batch.input_ids, batch.positions, batch.query_start_loc, batch.seq_lens, batch.slot_mapping
    # A forked child has a team of its own, and a program calls the one that it was recorded with.
    places = os.getpid(), batch.block_tables.data_ptr(), batch.block_tables.stride(0)
    return *places, *(x.data_ptr() for x in tensors)
