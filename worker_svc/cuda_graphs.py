"""The forward pass of decode steps as CUDA graphs, one per padded number of rows.

A decode step launches hundreds of kernels of a few microseconds each, which Python can't keep up with; a graph launches
them at once. A graph reads and writes fixed addresses: a step's inputs are copied to static buffers, and the rows
between the step's number and the graph's are padding that changes nothing: their slot is -1, so no KV is written, and
they have no keys, so attention reads none.

torch.compile is not used: what it would fuse are the few operations that kernels/ has fused already, and it compiles
for seconds per shape.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import torch

from worker_svc.models.interface import ForwardBatch, KvCaches, Model

logger = logging.getLogger(__name__)
MAX_ROWS = 512
"""With more rows a step's kernels take longer than their launches."""
_SMALL, _STEP, _LARGE_STEP, _FIRST_LARGE = (1, 2, 4), 8, 16, 256

Run = Callable[[], torch.Tensor]


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that have a graph: 1, 2, 4, then by 8 to 256 and by 16 to MAX_ROWS; max_num_seqs ends the list.

    Products of a few rows cost the same up to the next multiple of 8, so padding to it is free.
    """
    most = min(max_num_seqs, MAX_ROWS)
    every = [*_SMALL, *range(_STEP, _FIRST_LARGE, _STEP), *range(_FIRST_LARGE, MAX_ROWS + 1, _LARGE_STEP)]
    return [*(size for size in every if size < most), most]


class Recorder(Protocol):
    """Records a function of no arguments."""

    def record(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """What runs the recorded calls again, and the tensor that they fill each time."""
        ...


class GraphRecorder:
    """Records CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all: libraries keep a work space of tens of megabytes per stream.
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """See Recorder. `run` is called twice; the first time compiles kernels and takes libraries' work space."""
        side = self._stream
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        try:
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                output = run()
        except BaseException:
            torch.cuda.set_stream(current)  # an end of capture that raises leaves the thread on the other stream
            raise
        self._pool = self._pool or graph.pool()
        return graph.replay, output


class DecodeGraphs:
    """Runs a model's forward pass; by a graph where every row has one token. Belongs to the compute thread.

    Block tables are as wide as max_model_len needs. The caches must live as long as this. A model that can't be
    captured (it waits for the device, say) runs by Python from then on, which is logged.
    """

    def __init__(
        self,
        model: Model,
        caches: KvCaches,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._caches, self._max_model_len = model, caches, max_model_len
        self._recorder = recorder or GraphRecorder(model.device)
        self._sizes = padded_sizes(max_num_seqs)
        self._graphs: dict[int, tuple[Callable[[], None], torch.Tensor]] = {}
        self._is_usable = True
        most, device = self._sizes[-1], model.device
        self._input_ids, self._positions = torch.zeros(2, most, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._query_start_loc = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        max_blocks = -(-max_model_len // block_size)
        self._block_tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)

    @property
    def num_recorded(self) -> int:
        """Numbers of rows that have a graph."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Captures every size, largest first, so that the smaller ones find their memory in the pool.

        Changes no KV: all rows are padding.
        """
        started = time.monotonic()
        for size in reversed(self._sizes):
            self._pad(0, size)
            if self._graph(size) is None:
                return
        seconds = time.monotonic() - started
        logger.info("captured CUDA graphs for %s rows in %.1f s", ", ".join(map(str, self._sizes)), seconds)

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size], valid until the next call; see Model.forward."""
        num_rows = len(batch.seq_lens)
        if not self._is_usable or batch.max_query_len != 1 or not 0 < num_rows <= self._sizes[-1]:
            return self._model.forward(batch, self._caches)
        if num_rows != len(batch.input_ids):  # a row without tokens
            return self._model.forward(batch, self._caches)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._fill(batch, num_rows)
        self._pad(num_rows, size)
        graph = self._graph(size)
        if graph is None:
            return self._model.forward(batch, self._caches)
        graph[0]()
        return graph[1][:num_rows]

    def _fill(self, batch: ForwardBatch, num_rows: int) -> None:
        self._input_ids[:num_rows].copy_(batch.input_ids)
        self._positions[:num_rows].copy_(batch.positions)
        self._slot_mapping[:num_rows].copy_(batch.slot_mapping)
        self._seq_lens[:num_rows].copy_(batch.seq_lens)
        # Columns behind a row's own blocks are not read, so what an earlier step left in them does not matter.
        self._block_tables[:num_rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)

    def _pad(self, num_rows: int, size: int) -> None:
        if num_rows < size:
            self._slot_mapping[num_rows:size].fill_(-1)
            self._seq_lens[num_rows:size].fill_(0)

    def _static_batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._slot_mapping[:size],
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )

    def _graph(self, size: int) -> tuple[Callable[[], None], torch.Tensor] | None:
        """The graph of a size, captured where there is none; None where the model can't be captured."""
        found = self._graphs.get(size)
        if found is None:
            static = self._static_batch(size)
            try:
                found = self._recorder.record(lambda: self._model.forward(static, self._caches))
            except Exception as error:
                if self._model.device.type == "cuda":
                    # Raises where the device is lost: that is no reason to go on.
                    torch.cuda.synchronize(self._model.device)
                logger.warning("decode steps run without CUDA graphs: the model can't be captured: %s", error)
                self._is_usable, self._graphs = False, {}
                return None
            self._graphs[size] = found
        return found
