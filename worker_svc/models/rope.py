"""Cosine and sine tables of rotary positions, from transformers' own frequencies so that both agree to the bit."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NATIVE_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Types whose frequencies do not change within the model's length limit.

"dynamic" changes them beyond max_position_embeddings only, which no sequence of ours reaches. "longrope" changes them
in the middle of a sequence.
"""


def rope_type(config: Any) -> str:
    """The kind of scaling that a configuration names."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def rope_tables(config: Any, max_model_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [max_model_len, rotary size / 2], float32, rounded to dtype as transformers rounds them."""
    kind = rope_type(config)
    if kind == "default":
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, head_size, 2, dtype=torch.float) / head_size
        inverse_frequencies, scaling = 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    angles = torch.arange(max_model_len).float()[:, None] * inverse_frequencies.float()
    tables = [(turn * scaling).to(dtype).float() for turn in (angles.cos(), angles.sin())]
    return tables[0], tables[1]
