"""Every architecture, native and generic, against transformers' eager form: logits at every position.

Tokens prove nothing for small random models, so each comparison is also shown to fail when a part of attention is
knocked out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import paged_logits, random_sequences, relative_error
from tiny_models import ALL, BY_NAME, VOCAB_SIZE, build, eager_logits

import kernels
from worker_svc.models.interface import ForwardBatch, Model
from worker_svc.models.loader import load_model

MAX_ERROR = 2e-5
"""Part of the largest logit. The largest found is 5e-6."""
MIN_KNOCKED_OUT_ERROR = 2e-3

PATHS = [(tiny.name, path) for tiny in ALL for path in (("native", "generic") if tiny.is_native else ("generic",))]
Directory = Callable[[str], Path]

_loaded: dict[tuple[str, str], Model] = {}


def load(name: str, path: str, directory: Directory) -> Model:
    if (name, path) not in _loaded:
        loaded = load_model(str(directory(name)), dtype="float32", force_generic=path == "generic")
        assert loaded.info.is_native == (path == "native")
        assert loaded.info.num_layers == BY_NAME[name].config().num_hidden_layers
        _loaded[name, path] = loaded.model
    return _loaded[name, path]


def error_of(model: Any, name: str, **options: Any) -> float:
    sequences = random_sequences(VOCAB_SIZE)
    return relative_error(paged_logits(model, sequences, **options), eager_logits(build(name), sequences))


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_agrees_with_eager(name: str, path: str, tiny_directory: Directory) -> None:
    """In chunks and decodes, in mixed batches, over scrambled blocks full of NaN elsewhere.

    Case: vllm#5898
    """
    assert error_of(load(name, path, tiny_directory), name) <= MAX_ERROR


@pytest.mark.parametrize("chunks", [(1,), (64,), (3,)], ids=["decode", "whole", "threes"])
@pytest.mark.parametrize(("name", "path"), [("mistral", "native"), ("gemma2", "generic"), ("gpt-oss", "generic")])
def test_agrees_with_eager_whatever_the_chunks(
    name: str, path: str, chunks: tuple[int, ...], tiny_directory: Directory
) -> None:
    model = load(name, path, tiny_directory)
    assert error_of(model, name, chunks=chunks, block_size=5, seed=3) <= MAX_ERROR


class Shifted:
    """The model with positions that start again at each chunk."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch, kv_caches: Any) -> torch.Tensor:
        starts = batch.query_start_loc.long()
        firsts = torch.repeat_interleave(starts[:-1], starts.diff())
        positions = torch.arange(len(batch.positions)) - firsts
        return self._model.forward(dataclasses.replace(batch, positions=positions), kv_caches)


def faults() -> list[tuple[str, str, str]]:
    found = []
    for name, path in PATHS:
        tiny = BY_NAME[name]
        parts = {"window": tiny.has_window, "softcap": tiny.has_softcap, "sinks": tiny.has_sinks}
        found += [(name, path, fault) for fault in ("attention", "positions", *(p for p, has in parts.items() if has))]
    return found


@pytest.mark.parametrize(("name", "path", "fault"), faults())
def test_comparison_fails_when_a_part_is_knocked_out(
    name: str, path: str, fault: str, tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load(name, path, tiny_directory)
    paged_attention = kernels.paged_attention
    dropped = {"window": "sliding_window", "softcap": "softcap", "sinks": "sinks"}.get(fault)

    def knocked_out(*args: Any, **kwargs: Any) -> torch.Tensor:
        if dropped is not None:
            kwargs[dropped] = None
        result = paged_attention(*args, **kwargs)
        return torch.zeros_like(result) if fault == "attention" else result

    monkeypatch.setattr(kernels, "paged_attention", knocked_out)
    error = error_of(Shifted(model) if fault == "positions" else model, name)
    assert error >= MIN_KNOCKED_OUT_ERROR


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "path"), [("llama", "native"), ("qwen3", "native"), ("gemma3", "generic")])
def test_sixteen_bits_stay_close(name: str, path: str, dtype: str, tiny_directory: Directory) -> None:
    """Against float32: as close as transformers itself is in that type, within a factor of 2."""
    loaded = load_model(str(tiny_directory(name)), dtype=dtype, force_generic=path == "generic")
    assert loaded.info.dtype == dtype and loaded.info.kv_cache_dtype == dtype
    sequences = random_sequences(VOCAB_SIZE)
    expected = torch.cat(eager_logits(build(name), sequences))
    same_type = eager_logits(_in_dtype(name, loaded.model.dtype), sequences)
    theirs = float((torch.cat(same_type) - expected).norm() / expected.norm())
    got = torch.cat(paged_logits(loaded.model, sequences))
    assert float((got - expected).norm() / expected.norm()) <= 2 * theirs < 0.5


def _in_dtype(name: str, dtype: torch.dtype) -> Any:
    config = build(name).config
    model = type(build(name))(config).to(dtype).eval()
    model.load_state_dict(build(name).state_dict())
    model.set_attn_implementation("eager")
    return model
