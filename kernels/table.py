"""The table of operations. A new operation is its own file and one line here."""

from __future__ import annotations

from typing import Any

from kernels import (
    activation,
    attention,
    attention_merge,
    block_copy,
    block_zero,
    draft_verification,
    kv_write,
    logprobs,
    matrix,
    norm,
    penalties,
    rotary_write,
    sampling,
)
from kernels.dispatch import Operation

paged_attention = Operation(attention.reference, cpu=attention.cpu_paged_attention, cuda=attention.cuda_paged_attention)
merge_attention = Operation(
    attention_merge.reference, cpu=attention_merge.torch_merge_attention, cuda=attention_merge.cuda_merge_attention
)
write_kv = Operation(kv_write.reference, cpu=kv_write.cpu_write_kv, cuda=kv_write.cuda_write_kv)
rms_norm = Operation(norm.reference, cpu=norm.cpu_rms_norm, cuda=norm.cuda_rms_norm)
rotate_and_write_kv = Operation(
    rotary_write.reference, cpu=rotary_write.cpu_rotate_and_write_kv, cuda=rotary_write.cuda_rotate_and_write_kv
)
linear = Operation(matrix.reference, cpu=matrix.cpu_linear)
gated_linear = Operation(matrix.reference_gated, cpu=matrix.cpu_gated_linear, cuda=matrix.cuda_gated_linear)
logits = Operation(matrix.reference_logits, cpu=matrix.cpu_logits)
embedding = Operation(matrix.reference_embedding, cpu=matrix.cpu_embedding)
silu_and_mul = Operation(activation.reference, cpu=activation.torch_silu_and_mul, cuda=activation.cuda_silu_and_mul)
gelu_and_mul = Operation(
    activation.reference_gelu, cpu=activation.torch_gelu_and_mul, cuda=activation.cuda_gelu_and_mul
)
gelu_tanh_and_mul = Operation(
    activation.reference_gelu_tanh, cpu=activation.torch_gelu_tanh_and_mul, cuda=activation.cuda_gelu_tanh_and_mul
)
copy_blocks = Operation(block_copy.reference, cpu=block_copy.torch_copy_blocks, cuda=block_copy.cuda_copy_blocks)
zero_blocks = Operation(block_zero.reference, cpu=block_zero.torch_zero_blocks, cuda=block_zero.cuda_zero_blocks)
argmax = Operation(sampling.reference_argmax, cpu=sampling.cpu_argmax, cuda=sampling.cuda_argmax)
sample = Operation(sampling.reference, cpu=sampling.cpu_sample, cuda=sampling.cuda_sample)
gather_logprobs = Operation(logprobs.reference, cpu=logprobs.cpu_gather_logprobs, cuda=logprobs.cuda_gather_logprobs)
verify_drafts = Operation(
    draft_verification.reference,
    cpu=draft_verification.cpu_verify_drafts,
    cuda=draft_verification.cuda_verify_drafts,
)
apply_repetition_penalty = Operation(
    penalties.reference_apply_repetition_penalty,
    cpu=penalties.apply_repetition_penalty,
    cuda=penalties.cuda_apply_repetition_penalty,
)
apply_output_penalties = Operation(
    penalties.reference_apply_output_penalties,
    cpu=penalties.apply_output_penalties,
    cuda=penalties.cuda_apply_output_penalties,
)
add_bias = Operation(penalties.reference_add_bias, cpu=penalties.add_bias, cuda=penalties.cuda_add_bias)
mask_tokens = Operation(penalties.reference_mask_tokens, cpu=penalties.mask_tokens, cuda=penalties.cuda_mask_tokens)
apply_bitmask = Operation(
    penalties.reference_apply_bitmask, cpu=penalties.apply_bitmask, cuda=penalties.cuda_apply_bitmask
)

OPERATIONS: dict[str, Operation[..., Any]] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Operation)
}
"""By name; the parity test walks it."""
