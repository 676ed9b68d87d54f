"""Fills a native decoder from safetensors, from GGUF, or with random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.packed_weight import PackedWeight, WeightPart
from pagewire.errors import InvalidArgumentError, NotFoundError, violation
from worker_svc.models.gguf_files import OnFraction, gguf_tensors
from worker_svc.models.sources import ModelFiles

DUMMY_STD = 0.02
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def fill_from_files(
    views: Mapping[str, torch.Tensor | WeightPart],
    files: ModelFiles,
    config: Any,
    *,
    is_tied: bool,
    on_fraction: OnFraction,
    keep_blocks: bool = False,
    take_other: Callable[[str, torch.Tensor], bool] = lambda name, tensor: False,
) -> None:
    """Copies every tensor of a checkpoint to its view; keep_blocks: matrices of a GGUF file as they are there.

    take_other: takes tensors that a checkpoint may have besides, and tells whether it did; ValueError for bad ones.

    Raises InvalidArgumentError naming the file for tensors that are missing, unknown or of another shape.
    """
    tensors = gguf_tensors(files.path, config, on_fraction, keep_blocks) if files.gguf_file else _safetensors(files)
    missing = set(views)
    for name, tensor in tensors:
        view = views.get(name)
        if view is None:
            if name.endswith(_IGNORED_SUFFIXES) or (is_tied and name == "lm_head.weight"):
                continue
            try:
                if isinstance(tensor, torch.Tensor) and take_other(name, tensor):
                    continue
            except ValueError as error:
                raise _bad(files, f"{name} {error}") from error
            raise _bad(files, f"has a tensor {name} that the architecture does not know")
        if view.shape != tensor.shape:
            raise _bad(files, f"{name} has shape {tuple(tensor.shape)}, the configuration says {tuple(view.shape)}")
        # Only the views of a GgufWeight get blocks, and take them.
        view.copy_(tensor)  # type: ignore[arg-type]
        missing.discard(name)
        if not files.gguf_file:
            on_fraction(1 - len(missing) / len(views))
    if missing:
        raise _bad(files, f"{len(missing)} of {len(views)} tensors are missing, the first is {min(missing)}")


def fill_with_random(views: Iterable[tuple[str, torch.Tensor | WeightPart]]) -> None:
    """The same random weights in every process: norms 1, biases 0, the others normal."""
    generator = torch.Generator().manual_seed(0)
    for name, view in views:
        if isinstance(view, torch.Tensor) and view.dim() == 1:
            view.fill_(0 if name.endswith("bias") else 1)
        else:
            view.copy_(torch.randn(view.shape, generator=generator) * DUMMY_STD)


def check_has_weights(files: ModelFiles) -> None:
    """Raises NotFoundError where a directory has no weights that can be read."""
    if not files.weight_paths():
        others = sorted(path.name for path in files.directory.glob("*.bin"))
        hint = f"; {others[0]} is a pickle, convert it to safetensors" if others else ""
        raise NotFoundError(
            f"model {str(files.directory)!r} has no weights: there is no model.safetensors and no "
            f"model.safetensors.index.json{hint}",
            reason="MODEL_WEIGHTS_NOT_FOUND",
        )


def _safetensors(files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files.weight_paths():
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(
                [violation("model", str(path), f"can't be read: {error}")], reason="BAD_MODEL_FILES"
            ) from error


def count(weights: Iterable[torch.Tensor | PackedWeight]) -> tuple[int, int]:
    """Number of parameters and bytes, each memory counted once."""
    distinct = {_identity(weight): weight for weight in weights}.values()
    return sum(math.prod(weight.shape) for weight in distinct), sum(weight.nbytes for weight in distinct)


def _identity(weight: torch.Tensor | PackedWeight) -> int:
    if isinstance(weight, torch.Tensor) and weight.device.type != "meta":
        return weight.data_ptr()
    return id(weight)


def _bad(files: ModelFiles, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError([violation("model", str(files.path), problem)], reason="BAD_MODEL_FILES")
