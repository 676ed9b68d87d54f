"""Reads GGUF files with what transformers knows of them, once."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

OnFraction = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix as a GGUF file holds it: `blocks` uint8 [rows, bytes of a row], of a type such as "Q4_1"."""

    shape: torch.Size
    type_name: str
    blocks: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The matrix in float32."""
        type_ = gguf.GGMLQuantizationType[self.type_name]
        return torch.from_numpy(gguf.dequantize(self.blocks.numpy(), type_))


def gguf_tensors(
    path: Path, config: Any, on_fraction: OnFraction, keep_blocks: bool = False
) -> Iterator[tuple[str, torch.Tensor | BlockTensor]]:
    """Names (those of the Hugging Face checkpoint) and float32 tensors, one at a time; the file is mapped, not read.

    keep_blocks: matrices come as they are in the file. transformers knows the names and the order of rows, and wants a
    model to tell them; one without memory will do. What it does to rows it can do to rows of blocks.
    """
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    theirs = modeling_gguf_pytorch_utils
    parsed = theirs.load_gguf_checkpoint(str(path))
    reader = gguf.GGUFReader(str(path))
    architecture = theirs.read_field(reader, "general.architecture")[0]
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=parsed["config"])
    names = theirs.get_gguf_hf_weights_map(skeleton, processor)
    parsed["tensors"] = {}
    for i, tensor in enumerate(reader.tensors):
        on_fraction(i / len(reader.tensors))
        rows = np.asarray(tensor.data)
        is_matrix = keep_blocks and rows.ndim == 2 and rows.dtype == np.uint8
        if not is_matrix:
            rows = gguf.dequantize(rows, tensor.tensor_type)
        result = processor.process(weights=rows, name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed)
        if result.name not in names:
            continue
        # A mapped file can't be written to, which torch would warn of.
        found = torch.from_numpy(np.copy(result.weights))
        if is_matrix:
            shape = torch.Size(int(n) for n in reversed(tensor.shape))
            yield names[result.name], BlockTensor(shape, tensor.tensor_type.name, found)
        else:
            yield names[result.name], found


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
