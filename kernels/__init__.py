"""Pure functions on tensors for paged-attention models; they know nothing of requests.

`kernels.paged_attention(...)` and its sisters choose by device. Each operation's file has the implementation and a
`reference` of the same signature, written for reading.
"""

from kernels.table import (
    OPERATIONS,
    add_bias,
    apply_bitmask,
    apply_output_penalties,
    apply_repetition_penalty,
    argmax,
    copy_blocks,
    embedding,
    gated_linear,
    gather_logprobs,
    gelu_and_mul,
    gelu_tanh_and_mul,
    linear,
    logits,
    mask_tokens,
    merge_attention,
    paged_attention,
    rms_norm,
    rotate_and_write_kv,
    sample,
    silu_and_mul,
    verify_drafts,
    write_kv,
    zero_blocks,
)

__all__ = [
    "OPERATIONS",
    "add_bias",
    "apply_bitmask",
    "apply_output_penalties",
    "apply_repetition_penalty",
    "argmax",
    "copy_blocks",
    "embedding",
    "gated_linear",
    "gather_logprobs",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "linear",
    "logits",
    "mask_tokens",
    "merge_attention",
    "paged_attention",
    "rms_norm",
    "rotate_and_write_kv",
    "sample",
    "silu_and_mul",
    "verify_drafts",
    "write_kv",
    "zero_blocks",
]
