"""Scales of a KV cache of 8 bits, as a checkpoint has them: keys and values are divided by them when written.

llm-compressor and ModelOpt measure them, per layer, and for keys and values apart. Where a checkpoint has none they are
1, and what is beyond 448, which few models reach, is written as that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, cast

import torch

from worker_svc.models.interface import Model

logger = logging.getLogger(__name__)
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_proj\.)?([kv])_scale")


def parse_name(name: str) -> tuple[int, bool] | None:
    """Layer of a checkpoint's scale, and whether it is that of keys; None for any other tensor."""
    found = _NAME.fullmatch(name)
    if found is None or found[2] not in (None, found[3]):
        return None
    return int(found[1]), found[3] == "k"


def checked(scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """A scale as the kernels take it, float32 [1] or [num_kv_heads]; ValueError for any other shape or number."""
    values = scale.to(torch.float32).reshape(-1)
    if len(values) not in (1, num_kv_heads):
        raise ValueError(f"has {len(values)} numbers, of a layer with {num_kv_heads} KV heads it must have 1 or that")
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError("must be above 0")
    return values


def is_for_kv_alone(quantization_config: Any) -> bool:
    """Whether a configuration says that the KV cache is of 8-bit floats, and nothing of weights and activations."""
    if not isinstance(quantization_config, Mapping) or quantization_config.get("config_groups"):
        return False
    scheme = quantization_config.get("kv_cache_scheme")
    return (
        quantization_config.get("quant_method") == "compressed-tensors"
        and isinstance(scheme, Mapping)
        and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        and not scheme.get("dynamic")
    )


def warn_without_scales(model: Model, dtype: torch.dtype) -> None:
    """Says that a cache of 8 bits has no scales, where it is one and the model has none."""
    if dtype != torch.float8_e4m3fn:
        return
    buffers = cast(Any, model).named_buffers() if isinstance(model, torch.nn.Module) else ()
    if not any(name.endswith(("key_scale", "value_scale")) for name, _ in buffers):
        logger.warning("the KV cache is of 8 bits and the model has no scales for it: they are 1")
