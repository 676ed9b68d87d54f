"""What a model may be asked for: its type of numbers, its longest sequence, its quantization."""

from __future__ import annotations

from typing import Any

import torch

from pagewire.errors import InvalidArgumentError, violation
from worker_svc.models import kv_scales
from worker_svc.models.quantized_weights import GGUF, QUANTIZATIONS
from worker_svc.models.rope import rope_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MAX_MODEL_LEN = 2048


def dtype_name(dtype: object) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(
    asked: str, config: Any, *, device: torch.device, is_gguf: bool, is_quantized: bool = False
) -> torch.dtype:
    """The type of weights and activations.

    Unasked on a CPU: float32, and bfloat16 where the CPU has instructions for it and the model was saved so, or its
    weights are quantized. Unasked elsewhere: the model's own, which for a GGUF file is bfloat16. Raises
    InvalidArgumentError for an unknown name.
    """
    if asked:
        if asked not in DTYPES:
            raise InvalidArgumentError([violation("dtype", asked, f"must be one of {', '.join(DTYPES)}")])
        return DTYPES[asked]
    saved = torch.bfloat16 if is_gguf else _saved_dtype(config)
    if device.type != "cpu":
        return saved
    wants_bfloat16 = is_quantized or (saved == torch.bfloat16 and not is_gguf)
    return torch.bfloat16 if wants_bfloat16 and cpu_has_bfloat16() else torch.float32


def _saved_dtype(config: Any) -> torch.dtype:
    saved = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return DTYPES.get(dtype_name(saved), torch.float32)


def cpu_has_bfloat16() -> bool:
    """Whether products in bfloat16 have instructions of their own here."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe and probe())


def choose_max_model_len(asked: int, config: Any) -> int:
    """Longest sequence in tokens: the model's limit, or less where asked.

    A model with longrope scaling is limited to its original length: beyond it transformers changes the frequencies
    of the whole batch in the middle of a sequence. Raises InvalidArgumentError above the limit.
    """
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
    if rope_type(text_config) == "longrope":
        original = text_config.rope_parameters.get("original_max_position_embeddings")
        limit = min(limit, int(original or limit))
    if asked > limit:
        raise InvalidArgumentError([violation("max_model_len", asked, f"must be at most {limit}, the model's limit")])
    if asked < 0:
        raise InvalidArgumentError([violation("max_model_len", asked, "must be 0 (the model's limit) or more")])
    return int(asked or limit)


def check_quantization(
    asked: str, config: Any, architecture: str, *, is_native: bool, is_gguf: bool, device: torch.device
) -> None:
    """Raises InvalidArgumentError for a quantization that is not known, or that this model can't have here."""
    if asked:
        problem = ""
        if asked not in QUANTIZATIONS:
            problem = f"must be empty or one of {', '.join(QUANTIZATIONS)}"
        elif not is_native:
            problem = f"{architecture} runs through transformers' code, which has weights of dtype only"
        elif device.type != "cpu":
            problem = f"quantized weights are for the CPU, not for {device}"
        elif asked == GGUF and not is_gguf:
            problem = "there are no blocks of a GGUF file to run; int8 is for any model"
        if problem:
            raise InvalidArgumentError([violation("quantization", asked, problem)], reason="UNSUPPORTED_QUANTIZATION")
    found = getattr(config, "quantization_config", None)
    if found and not (is_native and kv_scales.is_for_kv_alone(found)):
        method = found.get("quant_method", found) if isinstance(found, dict) else found
        raise InvalidArgumentError(
            [violation("model", f"{architecture} with {method} weights", "quantized weights are not supported")],
            reason="UNSUPPORTED_QUANTIZATION",
        )
