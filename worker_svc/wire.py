"""Domain ⇄ proto for the worker: plans and masks come in, results go out."""

from __future__ import annotations

from typing import Any

import grpc

from pagewire.columns import pack_int32, unpack_int32
from pagewire.engine import ModelInfo
from pagewire.errors import InvalidArgumentError, PagewireError, UnimplementedError, violation
from pagewire.plan import GrammarMask, NewRequest, StepPlan, StepResult
from pagewire.sampling_wire import sampling_params_from_proto
from pagewire.stats import WorkerStats
from pagewire.stats_wire import fill
from pagewire.types_wire import (
    adapter_from_proto,
    dtype_from_proto,
    dtype_to_proto,
    logprob_columns_to_proto,
    model_info_to_proto,
    trace_context_from_proto,
)
from pagewire.v1 import types_pb2, worker_pb2

MAX_INCARNATION_CHARS = 128

Utility = worker_pb2.WorkerServiceUtilityResponse


def incarnation_from_proto(value: str, path: str = "core_incarnation") -> str:
    """A core's incarnation. Raises InvalidArgumentError where it is empty or no such id."""
    if not 0 < len(value) <= MAX_INCARNATION_CHARS:
        raise InvalidArgumentError([violation(path, value, f"must have 1 to {MAX_INCARNATION_CHARS} characters")])
    return value


def load_arguments_from_proto(message: worker_pb2.LoadModelRequest) -> dict[str, Any]:
    """Keyword arguments of Worker.load_model."""
    return {
        "model": message.model,
        "revision": message.revision,
        "dtype": dtype_from_proto(message.dtype, "dtype"),
        "quantization": message.quantization,
        "max_model_len": message.max_model_len,
        "force_generic": message.force_generic,
        "load_format": message.load_format,
    }


def loaded_to_proto(info: ModelInfo) -> worker_pb2.LoadModelResponse:
    """The last message of a load."""
    return worker_pb2.LoadModelResponse(stage="loaded", fraction=1.0, model=model_info_to_proto(info))


def cache_arguments_from_proto(message: worker_pb2.InitializeCacheRequest) -> dict[str, Any]:
    """Keyword arguments of Worker.initialize_cache."""
    return {
        "epoch": message.epoch,
        "block_size": message.block_size,
        "num_blocks": message.num_blocks,
        "memory_bytes": message.memory_bytes,
        "kv_cache_dtype": dtype_from_proto(message.kv_cache_dtype, "kv_cache_dtype"),
        "max_num_seqs": message.max_num_seqs,
        "max_num_batched_tokens": message.max_num_batched_tokens,
    }


def cache_to_proto(num_blocks: int, bytes_per_block: int, dtype: str) -> worker_pb2.InitializeCacheResponse:
    """The pool that was made."""
    return worker_pb2.InitializeCacheResponse(
        num_blocks=num_blocks, bytes_per_block=bytes_per_block, kv_cache_dtype=dtype_to_proto(dtype)
    )


def plan_from_proto(message: worker_pb2.StepPlan) -> StepPlan:
    """A plan. Raises InvalidArgumentError where a column is no column; what the numbers mean is checked later."""

    def column(name: str) -> Any:
        return unpack_int32(getattr(message, name), f"plan.{name}")

    if message.kv_transfers:
        raise UnimplementedError("plan.kv_transfers is reserved: this build does not serve it")
    return StepPlan(
        epoch=message.epoch,
        step=message.step,
        slots=column("slots"),
        num_scheduled_tokens=column("num_scheduled_tokens"),
        num_computed_tokens=column("num_computed_tokens"),
        num_sampled_tokens=column("num_sampled_tokens"),
        num_new_blocks=column("num_new_blocks"),
        new_block_ids=column("new_block_ids"),
        released_slots=column("released_slots"),
        new_requests=[_new_request(new, f"plan.new_requests[{i}]") for i, new in enumerate(message.new_requests)],
        num_draft_tokens=column("num_draft_tokens"),
        draft_token_ids=column("draft_token_ids"),
        copy_sources=unpack_int32(message.block_copies.sources, "plan.block_copies.sources"),
        copy_destinations=unpack_int32(message.block_copies.destinations, "plan.block_copies.destinations"),
        zero_block_ids=column("zero_block_ids"),
        awaits_grammar_mask=message.awaits_grammar_mask,
        trace_context=trace_context_from_proto(message.trace_context),
        num_drafts_wanted=message.num_drafts_wanted,
    )


def _new_request(message: worker_pb2.StepPlan.NewRequest, path: str) -> NewRequest:
    if message.media or message.HasField("pooling_params"):
        raise UnimplementedError(f"{path}: media and pooling_params are reserved: this build does not serve them")
    return NewRequest(
        slot=message.slot,
        frontend_incarnation=message.frontend_incarnation,
        request_id=message.request_id,
        token_ids=unpack_int32(message.token_ids, f"{path}.token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling_params=sampling_params_from_proto(message.sampling_params, f"{path}.sampling_params"),
        child_index=message.child_index,
        eos_token_ids=tuple(unpack_int32(message.eos_token_ids, f"{path}.eos_token_ids").tolist()),
        adapter=adapter_from_proto(message.adapter) if message.HasField("adapter") else None,
        prompt_logprobs_start=message.prompt_logprobs_start,
        trace_context=trace_context_from_proto(message.trace_context) if message.HasField("trace_context") else None,
    )


def mask_from_proto(message: worker_pb2.GrammarMask) -> GrammarMask:
    """A grammar mask."""
    return GrammarMask(
        epoch=message.epoch,
        step=message.step,
        slots=unpack_int32(message.slots, "grammar_mask.slots"),
        num_mask_rows=unpack_int32(message.num_mask_rows, "grammar_mask.num_mask_rows"),
        mask=unpack_int32(message.mask, "grammar_mask.mask"),
    )


def result_to_proto(result: StepResult) -> worker_pb2.ExecuteResponse:
    """A step's result as a message of the stream."""
    response = worker_pb2.ExecuteResponse()
    message = response.result
    message.epoch = result.epoch
    message.step = result.step
    message.slots = pack_int32(result.slots)
    message.num_tokens = pack_int32(result.num_tokens)
    message.token_ids = pack_int32(result.token_ids)
    message.num_draft_tokens = pack_int32(result.num_draft_tokens)
    message.draft_token_ids = pack_int32(result.draft_token_ids)
    for slot, columns in result.logprobs.items():
        message.logprobs.add(slot=slot, columns=logprob_columns_to_proto(columns))
    for slot, (start, columns) in result.prompt_logprobs.items():
        message.prompt_logprobs.add(slot=slot, start=start, columns=logprob_columns_to_proto(columns))
    for slot, error in result.errors.items():
        message.errors.add(slot=slot, message=error)
    for name in ("wait_ns", "prepare_ns", "forward_ns", "sample_ns", "idle_ns"):
        setattr(message.timings, name, max(getattr(result.timings, name), 0))
    return response


def failure_to_proto(epoch: int, step: int, error: PagewireError) -> worker_pb2.ExecuteResponse:
    """The result of a step that failed as a whole."""
    code = grpc.StatusCode[error.code].value[0]
    failure = worker_pb2.StepResult.StepFailure(code=code, message=error.message)
    return worker_pb2.ExecuteResponse(result=worker_pb2.StepResult(epoch=epoch, step=step, failure=failure))


def opened_to_proto(worker_incarnation: str, next_step: int) -> worker_pb2.ExecuteResponse:
    """The answer to Open."""
    opened = worker_pb2.ExecuteResponse.Opened(worker_incarnation=worker_incarnation, next_step=next_step)
    return worker_pb2.ExecuteResponse(opened=opened)


def heartbeat_to_proto(step_age_ms: int, step: int, progress: int) -> worker_pb2.ExecuteResponse:
    """A sign of life."""
    return worker_pb2.ExecuteResponse(
        heartbeat=types_pb2.Heartbeat(step_age_ms=step_age_ms, step=step, worker_progress=progress)
    )


def stats_to_proto(stats: WorkerStats) -> worker_pb2.WorkerServiceUtilityResponse:
    """Numbers about the worker."""
    return Utility(stats=fill(Utility.Stats(), stats))
