"""Domain ⇄ proto on the frontend's side of the core: requests and commands up, outputs, results and events down."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from core_svc.kv_event_log import KvEventBatch
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pagewire.columns import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    CoreStats,
    EngineInfo,
    EngineRequest,
    Finished,
    GetStats,
    Pause,
    PauseMode,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    StepOutputs,
    WakeUp,
)
from pagewire.errors import InvalidArgumentError, UnimplementedError, violation
from pagewire.sampling_wire import sampling_params_from_proto
from pagewire.stats import DetailWanted
from pagewire.types_wire import (
    adapter_from_proto,
    adapter_to_proto,
    core_stats_to_proto,
    logprob_columns_to_proto,
    model_info_to_proto,
    trace_context_from_proto,
)
from pagewire.v1 import core_pb2, types_pb2

MAX_INCARNATION_BYTES = 128
MAX_IDS = 65_536
"""Request ids in one message; more would hold up the loop for everybody."""
_CODES: dict[str, int] = {code.name: code.value[0] for code in grpc.StatusCode}


def incarnation_from_proto(incarnation: str, field: str) -> str:
    """A frontend's incarnation id. Raises InvalidArgumentError where it is empty or absurdly long."""
    if not 0 < len(incarnation) <= MAX_INCARNATION_BYTES:
        limit = f"must have 1 to {MAX_INCARNATION_BYTES} characters"
        raise InvalidArgumentError([violation(field, incarnation, limit)])
    return incarnation


def requests_from_proto(message: core_pb2.AddRequest) -> list[EngineRequest]:
    """The requests to add. Raises InvalidArgumentError with the paths of columns that have no right length."""
    return [engine_request_from_proto(request, f"requests[{i}]") for i, request in enumerate(message.requests)]


def engine_request_from_proto(message: core_pb2.EngineRequest, path: str) -> EngineRequest:
    """One request. `path` names it in errors."""
    reserved = {
        "media": len(message.media) > 0,
        "pooling_params": message.HasField("pooling_params"),
        "kv_transfer_params": message.HasField("kv_transfer_params"),
    }
    for name, is_set in reserved.items():
        if is_set:
            raise UnimplementedError(f"{path}.{name} is reserved: this build does not serve it")
    return EngineRequest(
        request_id=message.request_id,
        prompt_token_ids=unpack_int32(message.prompt_token_ids, f"{path}.prompt_token_ids"),
        output_token_ids=unpack_int32(message.output_token_ids, f"{path}.output_token_ids"),
        sampling_params=sampling_params_from_proto(message.sampling_params, f"{path}.sampling_params"),
        child_index=message.child_index,
        eos_token_ids=tuple(unpack_int32(message.eos_token_ids, f"{path}.eos_token_ids").tolist()),
        priority=message.priority,
        arrival_time_ns=message.arrival_time_ns,
        remaining_ms=message.remaining_ms if message.HasField("remaining_ms") else None,
        cache_salt=message.cache_salt,
        adapter=adapter_from_proto(message.adapter) if message.HasField("adapter") else None,
        trace_context=trace_context_from_proto(message.trace_context) if message.HasField("trace_context") else None,
        external_request_id=message.external_request_id,
    )


def _request_ids(data: bytes, field: str) -> list[int]:
    if len(data) > 8 * MAX_IDS:
        raise InvalidArgumentError([violation(field, f"{len(data) // 8} ids", f"must have at most {MAX_IDS}")])
    ids: list[int] = unpack_uint64(data, field).tolist()
    return ids


def abort_from_proto(message: core_pb2.EngineCoreServiceAbortRequest) -> tuple[list[int], AbortReason]:
    """Ids and reason. A reason of a newer contract counts as not said."""
    ids = _request_ids(message.request_ids, "request_ids")
    try:
        return ids, AbortReason(message.reason)
    except ValueError:
        return ids, AbortReason.UNSPECIFIED


def abort_outcomes_to_proto(outcomes: Sequence[AbortOutcome]) -> core_pb2.EngineCoreServiceAbortResponse:
    """One outcome per id."""
    return core_pb2.EngineCoreServiceAbortResponse(outcomes=[types_pb2.AbortOutcome.ValueType(o) for o in outcomes])


def open_from_proto(message: core_pb2.StreamOutputsRequest) -> tuple[str, dict[int, int]]:
    """Frontend incarnation, and output tokens that it has by request that it still wants."""
    if message.WhichOneof("message") != "open":
        found = message.WhichOneof("message") or "unset"
        raise InvalidArgumentError([violation("message", found, "must be open in the first message of the stream")])
    incarnation = incarnation_from_proto(message.open.frontend_incarnation, "open.frontend_incarnation")
    ids = _request_ids(message.open.request_ids, "open.request_ids")
    counts = unpack_int32(message.open.num_received, "open.num_received").tolist()
    if len(ids) != len(counts):
        limit = f"must have one entry per open.request_ids, which has {len(ids)}"
        raise InvalidArgumentError([violation("open.num_received", f"{len(counts)} entries", limit)])
    return incarnation, dict(zip(ids, counts, strict=True))


def acknowledge_from_proto(message: core_pb2.StreamOutputsRequest) -> tuple[int, list[int]]:
    """Highest sequence number received, and requests whose finish was received."""
    if message.WhichOneof("message") != "acknowledge":
        found = message.WhichOneof("message") or "unset"
        raise InvalidArgumentError([violation("message", found, "must be acknowledge after the first message")])
    ids = _request_ids(message.acknowledge.finished_request_ids, "acknowledge.finished_request_ids")
    return message.acknowledge.sequence, ids


def opened_to_proto(core_incarnation: str, unknown_request_ids: Sequence[int]) -> core_pb2.StreamOutputsResponse:
    """The answer to Open."""
    return core_pb2.StreamOutputsResponse(
        opened=core_pb2.StreamOutputsResponse.Opened(
            core_incarnation=core_incarnation, unknown_request_ids=pack_uint64(unknown_request_ids)
        )
    )


def heartbeat_to_proto(step_age_ms: int, step: int, worker_progress: int) -> core_pb2.StreamOutputsResponse:
    """A sign of life."""
    return core_pb2.StreamOutputsResponse(
        heartbeat=types_pb2.Heartbeat(step_age_ms=step_age_ms, step=step, worker_progress=worker_progress)
    )


def outputs_to_proto(outputs: StepOutputs) -> core_pb2.StreamOutputsResponse:
    """A step's outputs as a message of the stream."""
    message = core_pb2.StreamOutputsResponse()
    proto = message.outputs
    proto.sequence = outputs.sequence
    proto.step = outputs.step
    proto.request_ids = pack_uint64(outputs.request_ids)
    proto.offsets = pack_int32(outputs.offsets)
    proto.num_tokens = pack_int32(outputs.num_tokens)
    proto.token_ids = pack_int32(outputs.token_ids)
    for finished in outputs.finished:
        _add_finished(proto, finished)
    for row, columns in outputs.logprobs.items():
        proto.logprobs.add(row=row, columns=logprob_columns_to_proto(columns))
    for row, (start, columns) in outputs.prompt_logprobs.items():
        proto.prompt_logprobs.add(row=row, start=start, columns=logprob_columns_to_proto(columns))
    for row, num_cached_tokens in outputs.started.items():
        proto.started.add(row=row, num_cached_tokens=num_cached_tokens)
    if outputs.stats is not None:
        proto.stats.CopyFrom(core_stats_to_proto(outputs.stats))
    return message


def _add_finished(proto: core_pb2.StepOutputs, finished: Finished) -> None:
    message = proto.finished.add(
        row=finished.row,
        reason=types_pb2.FinishReason.ValueType(finished.reason),
        abort_reason=types_pb2.AbortReason.ValueType(finished.abort_reason),
        error_code=_CODES.get(finished.error_code, 0),
        error_message=finished.error_message,
        num_preemptions=finished.num_preemptions,
        queue_us=max(finished.queue_us, 0),
        prefill_us=max(finished.prefill_us, 0),
        decode_us=max(finished.decode_us, 0),
    )
    if finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id


def engine_info_to_proto(info: EngineInfo, protocol_versions: types_pb2.ProtocolVersions) -> core_pb2.HandshakeResponse:
    """What the core tells a frontend."""
    return core_pb2.HandshakeResponse(
        core_incarnation=info.core_incarnation,
        protocol_versions=protocol_versions,
        model=model_info_to_proto(info.model),
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_requests=info.max_num_requests,
        features=info.features,
        lease_ms=info.lease_ms,
        heartbeat_interval_ms=info.heartbeat_interval_ms,
    )


def command_from_proto(message: core_pb2.UtilityRequest) -> Command:
    """The command. Raises InvalidArgumentError where none or a bad one is set."""
    name = message.WhichOneof("command")
    match name:
        case "reset_prefix_cache":
            return ResetPrefixCache(message.reset_prefix_cache.preempt_running)
        case "pause":
            return Pause(_pause_mode(message.pause.mode), message.pause.reset_prefix_cache)
        case "resume":
            return Resume()
        case "sleep":
            if message.sleep.level not in (1, 2):
                raise InvalidArgumentError([violation("sleep.level", message.sleep.level, "must be 1 or 2")])
            return Sleep(message.sleep.level)
        case "wake_up":
            return WakeUp()
        case "stats":
            return GetStats(_detail_wanted(message.stats.detail) if message.stats.HasField("detail") else None)
        case "profile":
            return Profile(message.profile.start)
        case None:
            raise InvalidArgumentError([violation("command", "unset", "must be set")])
        case _:
            raise UnimplementedError(f"command {name} is not served by this build")


def _detail_wanted(message: core_pb2.UtilityRequest.Stats.Detail) -> DetailWanted:
    return DetailWanted(message.max_requests, message.max_steps, message.max_blocks)


def _pause_mode(mode: int) -> PauseMode:
    try:
        return PauseMode(mode)
    except ValueError:
        limit = "must be PAUSE_MODE_ABORT, PAUSE_MODE_WAIT or PAUSE_MODE_KEEP"
        raise InvalidArgumentError([violation("pause.mode", mode, limit)]) from None


def command_result_to_proto(command: Command, result: CommandResult) -> core_pb2.UtilityResponse:
    """The result, in the member that answers the command."""
    response = core_pb2.UtilityResponse
    number = result if isinstance(result, int) else 0
    match command:
        case ResetPrefixCache():
            return response(reset_prefix_cache=response.ResetPrefixCache(num_preempted=number))
        case Pause():
            return response(pause=response.Pause(num_aborted=number))
        case Resume():
            return response(resume=response.Resume())
        case Sleep():
            return response(sleep=response.Sleep(freed_bytes=number))
        case WakeUp():
            return response(wake_up=response.WakeUp(epoch=number))
        case Profile():
            return response(profile=response.Profile(path=result if isinstance(result, str) else ""))
        case GetStats():
            return response(stats=core_stats_to_proto(result if isinstance(result, CoreStats) else CoreStats()))


def tokenizer_chunk_to_proto(chunk: types_pb2.TokenizerChunk) -> core_pb2.GetTokenizerResponse:
    """A piece of the tokenizer."""
    return core_pb2.GetTokenizerResponse(chunk=chunk)


def kv_events_to_proto(batch: KvEventBatch, core_incarnation: str) -> core_pb2.StreamKvEventsResponse:
    """A batch of prefix cache events."""
    message = core_pb2.StreamKvEventsResponse(
        sequence=batch.sequence, core_incarnation=core_incarnation, time_ns=batch.time_ns
    )
    for event in batch.events:
        match event:
            case BlockStored():
                message.events.add().block_stored.CopyFrom(
                    core_pb2.KvEvent.BlockStored(
                        block_hashes=event.block_hashes,
                        parent_block_hash=event.parent_block_hash,
                        token_ids=event.token_ids,
                        block_size=event.block_size,
                        adapter=adapter_to_proto(event.adapter),
                    )
                )
            case BlockRemoved():
                message.events.add().block_removed.block_hashes.extend(event.block_hashes)
            case AllBlocksCleared():
                message.events.add().all_blocks_cleared.SetInParent()
    return message
