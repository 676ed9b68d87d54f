"""Whole decode steps of a model of Llama-3.1-8B's shape with random weights, against the bandwidth floor.

The floor: every weight and every key and value is read once, at the rate of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import kernels
from bench.gpu_check.report import Bar, Row
from bench.gpu_check.setting import Setting
from pagewire.columns import int32
from pagewire.plan import NewRequest, StepPlan
from pagewire.sampling import SamplingParams
from worker_svc.batch import Batch
from worker_svc.compute import Deferred
from worker_svc.cuda_graphs import DecodeGraphs
from worker_svc.kv_pool import KvPool, allocate_pool
from worker_svc.models.decoder_config import DecoderConfig
from worker_svc.models.interface import ForwardBatch
from worker_svc.models.native import Decoder
from worker_svc.runner import ModelRunner

BATCHES, CONTEXT, MAX_MODEL_LEN, BLOCK_SIZE = (1, 32, 128), 1024, 2048, 16
MAX_OVER_FLOOR, BAR_BATCHES = 1.25, (1, 32)
_NUM_STEPS, _NUM_WARM_UP_STEPS = 40, 8


def _config(is_dry: bool) -> DecoderConfig:
    sizes = (61, 32, 48, 1, 4, 2, 16) if is_dry else (128256, 4096, 14336, 32, 32, 8, 128)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_size")
    return DecoderConfig(
        **dict(zip(names, sizes, strict=True)),
        rms_norm_eps=1e-5,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        is_tied=False,
        sliding_windows=(None,) * sizes[3],
    )


def build_model(setting: Setting) -> Decoder:
    """Random weights made on the device; no files."""
    config, max_model_len = _config(setting.is_dry), 64 if setting.is_dry else MAX_MODEL_LEN
    exponents = torch.arange(0, config.head_size, 2).float() / config.head_size
    angles = torch.arange(max_model_len).float()[:, None] / 500_000.0**exponents
    model = Decoder(config, (angles.cos(), angles.sin()), dtype=setting.dtype, device=setting.device)
    for weight in model.weights():
        assert isinstance(weight, torch.Tensor)
        weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
    return model


def floor_seconds(setting: Setting, model: Decoder, batch: int, context: int) -> float:
    """See the module; of the embedding only the batch's rows are read."""
    weights = sum(x.nbytes for x in model.parameters()) - model.embedding.nbytes
    token_bytes = sum(2 * spec.num_kv_heads * spec.head_size for spec in model.kv_cache_specs()) * model.dtype.itemsize
    return (weights + batch * context * token_bytes) / setting.copy_rate


def _decodes(pool: KvPool, batch: int, context: int, device: torch.device) -> ForwardBatch:
    """Every row is at the same context and has blocks of its own."""
    width = -(-context // pool.block_size)
    tables = (1 + torch.arange(batch * width, dtype=torch.int32, device=device)).view(batch, width)
    position = context - 1
    offset = position % pool.block_size
    return ForwardBatch(
        input_ids=torch.arange(batch, device=device),
        positions=torch.full((batch,), position, device=device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=tables[:, position // pool.block_size].long() * pool.block_size + offset,
        max_query_len=1,
        max_seq_len=context,
    )


class _CallsAgain:
    """Stands for a CUDA graph where there is none."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = run().clone()

        def replay() -> None:
            output.copy_(run())

        return replay, output


def _model_seconds(
    setting: Setting, model: Decoder, forward: Callable[[ForwardBatch], Any], batch: ForwardBatch
) -> float:
    """A step's forward pass, logits and greedy tokens, many of them back to back, as a server runs them."""

    def step() -> None:
        kernels.argmax(model.compute_logits(forward(batch)))

    return _per_step(setting, lambda count: [step() for _ in range(count)])


def _per_step(setting: Setting, run: Callable[[int], Any]) -> float:
    """Seconds per step: the best of three runs of many."""
    num_steps = 2 if setting.is_dry else _NUM_STEPS
    run(1 if setting.is_dry else _NUM_WARM_UP_STEPS)
    setting.synchronize()
    found = []
    for _ in range(1 if setting.is_dry else 3):
        started = time.perf_counter()
        run(num_steps)
        setting.synchronize()
        found.append((time.perf_counter() - started) / num_steps)
    return min(found)


class WorkerSteps:
    """A whole worker's steps, two in flight: plans in, results out, without the wire."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, num_steps: int, block_size: int) -> None:
        self.runner, self.num_rows, self.next_step = runner, batch, 1
        self.slots, self.computed = int32(range(batch)), int32([context - 1] * batch)
        width = -(-(context + num_steps) // block_size)
        params = SamplingParams(temperature=0.0)
        self.new = [NewRequest(i, "check", i, int32([1] * context), context, params) for i in range(batch)]
        self.num_new_blocks, self.blocks = int32([width] * batch), int32(range(1, 1 + batch * width))
        self.results = 0

    def run(self, count: int) -> None:
        """Steps; each one is launched before the one before it is waited for."""
        before: Any = None
        for _ in range(count):
            launched = self.runner.start(self._plan())
            if before is not None:
                self._take(before)
            before = launched
        self._take(before)

    def _take(self, started: Any) -> None:
        result = started.finish() if isinstance(started, Deferred) else started
        assert len(result.token_ids) == self.num_rows, result.errors
        self.results += 1

    def _plan(self) -> StepPlan:
        ones, is_first = int32([1] * self.num_rows), self.next_step == 1
        plan = StepPlan(
            epoch=1,
            step=self.next_step,
            slots=self.slots,
            num_scheduled_tokens=ones,
            num_computed_tokens=self.computed,
            num_sampled_tokens=ones,
            num_new_blocks=self.num_new_blocks if is_first else int32([0] * self.num_rows),
            new_block_ids=self.blocks if is_first else int32([]),
            new_requests=self.new if is_first else [],
        )
        self.next_step, self.computed = self.next_step + 1, self.computed + 1
        return plan


def run(setting: Setting) -> Iterator[Row]:
    """Per batch: the floor, the model and the whole worker, each with graphs and without."""
    setting.require(20)
    model = build_model(setting)
    context, batches = (9, (3,)) if setting.is_dry else (CONTEXT, BATCHES)
    width = -(-(context + 5 * _NUM_STEPS) // BLOCK_SIZE) if not setting.is_dry else 4
    pool = allocate_pool(
        model.kv_cache_specs(),
        block_size=BLOCK_SIZE,
        num_blocks=max(batches) * width + 1,
        memory_bytes=0,
        dtype=str(model.dtype).removeprefix("torch."),
        device=setting.device,
        most_blocks=1 << 30,
    )
    for batch in batches:
        row: Row = {"batch": batch, "context": context}
        try:
            _fill_row(setting, row, model, pool, width)
        except Exception as error:  # what was measured before it stays
            row["note"] = setting.reason(error)
        yield row
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def _fill_row(setting: Setting, row: Row, model: Decoder, pool: KvPool, width: int) -> None:
    """Adds the figures of a batch as they are measured; width: blocks per row."""
    setting.require(10)
    batch, context = row["batch"], row["context"]
    floor = floor_seconds(setting, model, batch, context)
    row["floor ms"] = floor * 1e3
    inputs = _decodes(pool, batch, context, setting.device)
    sizes = {"max_num_seqs": batch, "max_model_len": 64 if setting.is_dry else MAX_MODEL_LEN}
    recorder = _CallsAgain() if setting.is_dry else None

    def add(name: str, seconds: float) -> None:
        row[f"{name} ms"], row[f"{name} x floor"] = seconds * 1e3, seconds / floor

    # What has a bar comes first.
    for name, with_graphs in (("worker, graphs", True), ("worker, eager", False)):
        tokens = {"max_num_batched_tokens": max(batch, 64), "num_kv_blocks": pool.num_blocks}
        state = Batch(**sizes, **tokens, block_size=BLOCK_SIZE, vocab_size=model.vocab_size)
        runner = ModelRunner(
            model, pool, state, cuda_graphs=with_graphs, is_device=True, recorder=recorder if with_graphs else None
        )
        steps = WorkerSteps(runner, batch, context, width * BLOCK_SIZE - context, BLOCK_SIZE)
        add(name, _per_step(setting, steps.run))
    with torch.inference_mode():
        graphs = DecodeGraphs(model, pool.caches, **sizes, block_size=BLOCK_SIZE, recorder=recorder)
        add("model, graphs", _model_seconds(setting, model, graphs, inputs))
        add("model, eager", _model_seconds(setting, model, lambda b: model.forward(b, pool.caches), inputs))
    if not graphs.num_recorded:
        row["note"] = "the model could not be captured"


def bars(rows: list[Row]) -> list[Bar]:
    """The worst of the whole worker's steps with graphs."""
    chosen = [row for row in rows if row["batch"] in BAR_BATCHES and "worker, graphs x floor" in row]
    worst = max(chosen, key=lambda row: row["worker, graphs x floor"], default=None)
    what = f"a worker's decode step at most {MAX_OVER_FLOOR} x the bandwidth floor at batch 1 and 32, with CUDA graphs"
    if worst is None:
        return [Bar(what, "", None)]
    ratio = worst["worker, graphs x floor"]
    return [Bar(what, f"{ratio:.3f} at batch {worst['batch']}", ratio <= MAX_OVER_FLOOR)]
