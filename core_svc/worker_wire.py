"""Domain ⇄ proto on the worker's side of the core: plans down, results up, models, caches and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from core_svc.executor import CacheInfo, CacheSpec, ModelSpec
from pagewire import errors
from pagewire.columns import pack_int32, unpack_int32
from pagewire.engine import ModelInfo
from pagewire.errors import InternalError, PagewireError
from pagewire.plan import NewRequest, StepPlan, StepResult, Timings
from pagewire.sampling_wire import sampling_params_to_proto
from pagewire.types_wire import (
    adapter_to_proto,
    dtype_from_proto,
    dtype_to_proto,
    logprob_columns_from_proto,
    model_info_from_proto,
    trace_context_to_proto,
)
from pagewire.v1 import worker_pb2

_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_ERRORS: dict[str, Any] = {
    cls.code: cls
    for cls in (
        errors.FailedPreconditionError,
        errors.ResourceExhaustedError,
        errors.UnavailableError,
        errors.AbortedError,
        errors.DeadlineExceededError,
        errors.UnimplementedError,
        errors.NotFoundError,
    )
}


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker said at the handshake."""

    worker_incarnation: str
    device: str
    epoch: int
    """Epoch of its KV pool; 0 without one."""
    model: ModelInfo | None


def worker_info_from_proto(message: worker_pb2.WorkerServiceHandshakeResponse) -> WorkerInfo:
    """The handshake's answer."""
    model = model_info_from_proto(message.model) if message.HasField("model") else None
    return WorkerInfo(message.worker_incarnation, message.device, message.epoch, model)


def load_model_to_proto(spec: ModelSpec, core_incarnation: str) -> worker_pb2.LoadModelRequest:
    """What to load."""
    return worker_pb2.LoadModelRequest(
        core_incarnation=core_incarnation,
        model=spec.model,
        revision=spec.revision,
        dtype=dtype_to_proto(spec.dtype),
        quantization=spec.quantization,
        max_model_len=spec.max_model_len,
        force_generic=spec.force_generic,
        load_format=spec.load_format,
    )


def initialize_cache_to_proto(spec: CacheSpec, epoch: int, core_incarnation: str) -> worker_pb2.InitializeCacheRequest:
    """How to make the pool."""
    return worker_pb2.InitializeCacheRequest(
        core_incarnation=core_incarnation,
        epoch=epoch,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        memory_bytes=spec.memory_bytes,
        kv_cache_dtype=dtype_to_proto(spec.kv_cache_dtype),
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
    )


def cache_info_from_proto(message: worker_pb2.InitializeCacheResponse) -> CacheInfo:
    """The pool that was made."""
    return CacheInfo(message.num_blocks, message.bytes_per_block, dtype_from_proto(message.kv_cache_dtype))


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """A plan, column by column."""
    message = worker_pb2.StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        released_slots=pack_int32(plan.released_slots),
        slots=pack_int32(plan.slots),
        num_scheduled_tokens=pack_int32(plan.num_scheduled_tokens),
        num_computed_tokens=pack_int32(plan.num_computed_tokens),
        num_sampled_tokens=pack_int32(plan.num_sampled_tokens),
        num_new_blocks=pack_int32(plan.num_new_blocks),
        new_block_ids=pack_int32(plan.new_block_ids),
        num_draft_tokens=pack_int32(plan.num_draft_tokens),
        draft_token_ids=pack_int32(plan.draft_token_ids),
        zero_block_ids=pack_int32(plan.zero_block_ids),
        awaits_grammar_mask=plan.awaits_grammar_mask,
        num_drafts_wanted=plan.num_drafts_wanted,
        trace_context=trace_context_to_proto(plan.trace_context),
    )
    for request in plan.new_requests:
        _add_new_request(message, request)
    if len(plan.copy_sources):
        message.block_copies.sources = pack_int32(plan.copy_sources)
        message.block_copies.destinations = pack_int32(plan.copy_destinations)
    return message


def _add_new_request(plan: worker_pb2.StepPlan, request: NewRequest) -> None:
    plan.new_requests.add(
        slot=request.slot,
        frontend_incarnation=request.frontend_incarnation,
        request_id=request.request_id,
        token_ids=pack_int32(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=sampling_params_to_proto(request.sampling_params),
        child_index=request.child_index,
        eos_token_ids=pack_int32(request.eos_token_ids),
        prompt_logprobs_start=request.prompt_logprobs_start,
        adapter=adapter_to_proto(request.adapter),
        trace_context=trace_context_to_proto(request.trace_context),
    )


def result_from_proto(message: worker_pb2.StepResult) -> StepResult:
    """A result. Raises InvalidArgumentError where columns disagree: a worker of another kind."""
    slots = unpack_int32(message.slots, "result.slots")
    num_tokens = unpack_int32(message.num_tokens, "result.num_tokens")
    token_ids = unpack_int32(message.token_ids, "result.token_ids")
    if len(slots) != len(num_tokens) or int(num_tokens.sum()) != len(token_ids):
        raise InternalError(
            f"the worker's result of step {message.step} does not add up: {len(slots)} slots, "
            f"{len(num_tokens)} counts of {int(num_tokens.sum())} tokens in total, {len(token_ids)} tokens"
        )
    timings = message.timings
    return StepResult(
        epoch=message.epoch,
        step=message.step,
        slots=slots,
        num_tokens=num_tokens,
        token_ids=token_ids,
        logprobs={row.slot: logprob_columns_from_proto(row.columns) for row in message.logprobs},
        prompt_logprobs={
            row.slot: (row.start, logprob_columns_from_proto(row.columns)) for row in message.prompt_logprobs
        },
        errors={row.slot: row.message for row in message.errors},
        num_draft_tokens=unpack_int32(message.num_draft_tokens, "result.num_draft_tokens"),
        draft_token_ids=unpack_int32(message.draft_token_ids, "result.draft_token_ids"),
        timings=Timings(timings.wait_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns, timings.idle_ns),
    )


def failure_from_proto(message: worker_pb2.StepResult) -> PagewireError | None:
    """Why the whole step failed; None where it did not."""
    if not message.HasField("failure"):
        return None
    cls = _ERRORS.get(_CODE_NAMES.get(message.failure.code, "INTERNAL"), InternalError)
    error: PagewireError = cls(f"step {message.step} failed on the worker: {message.failure.message}")
    return error


def open_to_proto(core_incarnation: str, epoch: int) -> worker_pb2.ExecuteRequest:
    """The first message of an Execute stream."""
    return worker_pb2.ExecuteRequest(
        open=worker_pb2.ExecuteRequest.Open(core_incarnation=core_incarnation, epoch=epoch)
    )
