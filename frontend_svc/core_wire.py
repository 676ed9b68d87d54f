"""What goes to and comes from a core: plain Python to EngineCoreService's messages and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc

from pagewire.columns import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    GetStats,
    Pause,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    StepOutputs,
    WakeUp,
)
from pagewire.errors import InternalError
from pagewire.sampling_wire import sampling_params_to_proto
from pagewire.types_wire import (
    adapter_to_proto,
    core_stats_from_proto,
    logprob_columns_from_proto,
    model_info_from_proto,
    protocol_versions,
    trace_context_to_proto,
)
from pagewire.v1 import core_pb2, types_pb2

_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def handshake_request(frontend_incarnation: str) -> core_pb2.HandshakeRequest:
    """How a frontend introduces itself."""
    return core_pb2.HandshakeRequest(frontend_incarnation=frontend_incarnation, protocol_versions=protocol_versions())


def engine_info_from_proto(response: core_pb2.HandshakeResponse) -> EngineInfo:
    """What a core says of itself."""
    return EngineInfo(
        core_incarnation=response.core_incarnation,
        model=model_info_from_proto(response.model),
        block_size=response.block_size,
        num_kv_blocks=response.num_kv_blocks,
        max_num_seqs=response.max_num_seqs,
        max_num_batched_tokens=response.max_num_batched_tokens,
        max_num_requests=response.max_num_requests,
        features=tuple(response.features),
        lease_ms=response.lease_ms,
        heartbeat_interval_ms=response.heartbeat_interval_ms,
    )


def add_request(frontend_incarnation: str, requests: Sequence[EngineRequest]) -> core_pb2.AddRequest:
    """Requests to hand over."""
    return core_pb2.AddRequest(
        frontend_incarnation=frontend_incarnation, requests=[engine_request_to_proto(r) for r in requests]
    )


def engine_request_to_proto(request: EngineRequest) -> core_pb2.EngineRequest:
    """One request."""
    return core_pb2.EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=pack_int32(request.prompt_token_ids),
        output_token_ids=pack_int32(request.output_token_ids),
        sampling_params=sampling_params_to_proto(request.sampling_params),
        child_index=request.child_index,
        eos_token_ids=pack_int32(request.eos_token_ids),
        priority=request.priority,
        arrival_time_ns=request.arrival_time_ns,
        remaining_ms=request.remaining_ms,
        cache_salt=request.cache_salt,
        adapter=adapter_to_proto(request.adapter),
        trace_context=trace_context_to_proto(request.trace_context),
        external_request_id=request.external_request_id,
    )


def abort_request(
    frontend_incarnation: str, request_ids: Sequence[int], reason: AbortReason
) -> core_pb2.EngineCoreServiceAbortRequest:
    """Requests to end."""
    return core_pb2.EngineCoreServiceAbortRequest(
        frontend_incarnation=frontend_incarnation,
        request_ids=pack_uint64(request_ids),
        reason=types_pb2.AbortReason.ValueType(reason),
    )


def abort_outcomes(response: core_pb2.EngineCoreServiceAbortResponse) -> list[AbortOutcome]:
    """What became of each."""
    return [AbortOutcome(outcome) for outcome in response.outcomes]


def open_stream(frontend_incarnation: str, num_received: Mapping[int, int]) -> core_pb2.StreamOutputsRequest:
    """The first message of an output stream: what the frontend wants and how much of it it has."""
    return core_pb2.StreamOutputsRequest(
        open=core_pb2.StreamOutputsRequest.Open(
            frontend_incarnation=frontend_incarnation,
            request_ids=pack_uint64(num_received.keys()),
            num_received=pack_int32(num_received.values()),
        )
    )


def acknowledge(sequence: int, finished_request_ids: Sequence[int]) -> core_pb2.StreamOutputsRequest:
    """What the frontend has received."""
    return core_pb2.StreamOutputsRequest(
        acknowledge=core_pb2.StreamOutputsRequest.Acknowledge(
            sequence=sequence, finished_request_ids=pack_uint64(finished_request_ids)
        )
    )


def unknown_request_ids(opened: core_pb2.StreamOutputsResponse.Opened) -> list[int]:
    """Requests that the core does not have any more."""
    return [int(i) for i in unpack_uint64(opened.unknown_request_ids, "opened.unknown_request_ids")]


def step_outputs_from_proto(message: core_pb2.StepOutputs) -> StepOutputs:
    """Outputs of a step. Raises InternalError where the columns disagree."""
    outputs = StepOutputs(
        step=message.step,
        request_ids=unpack_uint64(message.request_ids, "request_ids"),
        offsets=unpack_int32(message.offsets, "offsets"),
        num_tokens=unpack_int32(message.num_tokens, "num_tokens"),
        token_ids=unpack_int32(message.token_ids, "token_ids"),
        sequence=message.sequence,
    )
    num_rows = len(outputs.request_ids)
    if not num_rows == len(outputs.offsets) == len(outputs.num_tokens):
        raise InternalError("the core sent columns of different lengths")
    if int(outputs.num_tokens.sum()) != len(outputs.token_ids) or (num_rows and int(outputs.num_tokens.min()) < 0):
        raise InternalError("the core sent a number of tokens that disagrees with num_tokens")
    if message.finished:
        outputs.finished = [_finished_from_proto(f) for f in message.finished]
    if message.logprobs:
        outputs.logprobs = {r.row: logprob_columns_from_proto(r.columns) for r in message.logprobs}
    if message.prompt_logprobs:
        outputs.prompt_logprobs = {
            r.row: (r.start, logprob_columns_from_proto(r.columns)) for r in message.prompt_logprobs
        }
    if message.started:
        outputs.started = {r.row: r.num_cached_tokens for r in message.started}
    if message.HasField("stats"):
        outputs.stats = core_stats_from_proto(message.stats)
    return outputs


def _finished_from_proto(message: core_pb2.StepOutputs.Finished) -> Finished:
    return Finished(
        row=message.row,
        reason=FinishReason(message.reason),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        abort_reason=AbortReason(message.abort_reason),
        error_code=_CODE_NAMES.get(message.error_code, "") if message.error_code else "",
        error_message=message.error_message,
        num_preemptions=message.num_preemptions,
        queue_us=message.queue_us,
        prefill_us=message.prefill_us,
        decode_us=message.decode_us,
    )


def command_to_proto(command: Command) -> core_pb2.UtilityRequest:
    """An administrative command."""
    request = core_pb2.UtilityRequest
    match command:
        case ResetPrefixCache():
            return request(reset_prefix_cache=request.ResetPrefixCache(preempt_running=command.preempt_running))
        case Pause():
            mode = core_pb2.PauseMode.ValueType(command.mode)
            return request(pause=request.Pause(mode=mode, reset_prefix_cache=command.reset_prefix_cache))
        case Resume():
            return request(resume=request.Resume())
        case Sleep():
            return request(sleep=request.Sleep(level=command.level))
        case WakeUp():
            return request(wake_up=request.WakeUp())
        case GetStats():
            return request(stats=request.Stats())
        case Profile():
            return request(profile=request.Profile(start=command.start))


def command_result(response: core_pb2.UtilityResponse) -> CommandResult:
    """The result of a command."""
    match response.WhichOneof("result"):
        case "reset_prefix_cache":
            return response.reset_prefix_cache.num_preempted
        case "pause":
            return response.pause.num_aborted
        case "sleep":
            return response.sleep.freed_bytes
        case "wake_up":
            return response.wake_up.epoch
        case "stats":
            return core_stats_from_proto(response.stats)
        case "profile":
            return response.profile.path
        case _:
            return None
