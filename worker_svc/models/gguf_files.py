"""Reads GGUF files through transformers, once."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

OnFraction = Callable[[float], None]


def gguf_tensors(path: Path, config: Any, on_fraction: OnFraction) -> Iterator[tuple[str, torch.Tensor]]:
    """Names (those of the Hugging Face checkpoint) and dequantized float32 tensors.

    transformers wants a model to know the names; one without memory will do.
    """
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    with gguf_progress(on_fraction):
        loaded = modeling_gguf_pytorch_utils.load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=skeleton
        )
    tensors: dict[str, torch.Tensor] = loaded["tensors"]
    for name in list(tensors):
        yield name, tensors.pop(name)


@contextlib.contextmanager
def gguf_progress(on_fraction: OnFraction) -> Iterator[None]:
    """Turns the progress bar that transformers draws while it dequantizes into calls of `on_fraction`."""

    def report(items: Any, **_: Any) -> Iterator[Any]:
        total = max(1, len(items))
        for i, item in enumerate(items):
            on_fraction(i / total)
            yield item

    with _replaced(modeling_gguf_pytorch_utils, "tqdm", report):
        yield


class _PlainReader(gguf.GGUFReader):
    """Slices a plain array over the file: slicing a numpy.memmap costs several times as much, millions of times."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self._data = np.asarray(value)


@contextlib.contextmanager
def shared_gguf_parsing() -> Iterator[None]:
    """Within it, a GGUF file is parsed once.

    transformers parses it anew for the configuration, the weights and the tokenizer, and makes the table of tensor
    names anew for each module; together that is most of the time that a small model takes to load.
    """
    load = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    metadata: dict[str, Any] = {}

    def load_once(path: Any, return_tensors: bool = False, **kwargs: Any) -> Any:
        if return_tensors:
            return load(path, return_tensors=True, **kwargs)
        if str(path) not in metadata:
            metadata[str(path)] = load(path, **kwargs)
        return copy.deepcopy(metadata[str(path)])

    with (
        _replaced(gguf, "GGUFReader", functools.cache(_PlainReader)),
        _replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        _replaced(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", load_once),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    names = vars(module)
    before, names[name] = names[name], value
    try:
        yield
    finally:
        names[name] = before
