"""The core's wire conversions: every field survives, and what is malformed is refused with its path."""

from __future__ import annotations

from dataclasses import fields

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_svc import wire, worker_wire
from core_svc.kv_event_log import KvEventBatch
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pagewire.columns import pack_int32, pack_uint64, unpack_float32, unpack_int32, unpack_uint64
from pagewire.engine import (
    AbortReason,
    Adapter,
    CoreStats,
    Finished,
    FinishReason,
    GetStats,
    LogprobColumns,
    Pause,
    PauseMode,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    StepOutputs,
    TraceContext,
    WakeUp,
)
from pagewire.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnimplementedError
from pagewire.plan import NewRequest, StepPlan
from pagewire.sampling import SamplingParams
from pagewire.sampling_wire import sampling_params_from_proto, sampling_params_to_proto
from pagewire.types_wire import core_stats_from_proto, logprob_columns_from_proto, logprob_columns_to_proto
from pagewire.v1 import core_pb2, types_pb2, worker_pb2

int32s = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
uint64 = st.integers(0, 2**64 - 1)
REQUEST_COLUMNS = ("prompt_token_ids", "output_token_ids", "eos_token_ids")


def make_logprobs(num_positions: int, num_candidates: int) -> LogprobColumns:
    ids = np.arange(num_positions * num_candidates, dtype=np.int32).reshape(num_positions, num_candidates)
    return LogprobColumns(ids, -ids.astype(np.float32) / 7, np.arange(num_positions, dtype=np.int32) + 1)


def assert_same_logprobs(a: LogprobColumns, b: LogprobColumns) -> None:
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    np.testing.assert_array_equal(a.ranks, b.ranks)


@given(prompt=int32s, output=int32s, eos=int32s, request_id=uint64, remaining=st.none() | uint64, salt=st.text())
def test_engine_request(
    prompt: list[int], output: list[int], eos: list[int], request_id: int, remaining: int | None, salt: str
) -> None:
    params = SamplingParams(temperature=0.5, seed=2**64 - 1, max_tokens=7, stop_token_ids=(3, 4))
    message = core_pb2.EngineRequest(
        request_id=request_id,
        prompt_token_ids=pack_int32(prompt),
        output_token_ids=pack_int32(output),
        eos_token_ids=pack_int32(eos),
        sampling_params=sampling_params_to_proto(params),
        child_index=3,
        priority=-5,
        arrival_time_ns=11,
        remaining_ms=remaining,
        cache_salt=salt,
        adapter=types_pb2.AdapterRef(name="a", version=2),
        trace_context=types_pb2.TraceContext(traceparent="00-1"),
        external_request_id="mine",
    )
    message = core_pb2.EngineRequest.FromString(message.SerializeToString())
    request = wire.engine_request_from_proto(message, "requests[0]")
    assert request.request_id == request_id
    assert request.prompt_token_ids.tolist() == prompt
    assert request.output_token_ids.tolist() == output
    assert request.eos_token_ids == tuple(eos)
    assert request.sampling_params == params
    assert (request.child_index, request.priority, request.arrival_time_ns) == (3, -5, 11)
    assert (request.remaining_ms, request.cache_salt) == (remaining, salt)
    assert request.adapter == Adapter("a", 2)
    assert request.trace_context == TraceContext("00-1")
    assert request.external_request_id == "mine"


@pytest.mark.parametrize("name", REQUEST_COLUMNS)
def test_a_column_of_a_wrong_length_is_refused_with_its_path(name: str) -> None:
    good = core_pb2.EngineRequest(request_id=1)
    bad = core_pb2.EngineRequest(request_id=2, **{name: b"12345"})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as caught:
        wire.requests_from_proto(core_pb2.AddRequest(requests=[good, bad]))
    assert caught.value.violations[0].field == f"requests[1].{name}"
    assert "multiple of 4" in caught.value.violations[0].limit


@pytest.mark.parametrize(
    "fields_set",
    [
        {"media": [types_pb2.MediaItem()]},
        {"pooling_params": types_pb2.PoolingParams()},
        {"kv_transfer_params": types_pb2.KvTransferParams()},
    ],
)
def test_reserved_fields_are_not_ignored_in_silence(fields_set: dict[str, object]) -> None:
    with pytest.raises(UnimplementedError, match=r"requests\[4\]\."):
        wire.engine_request_from_proto(core_pb2.EngineRequest(**fields_set), "requests[4]")  # type: ignore[arg-type]


def test_abort_and_open_and_acknowledge() -> None:
    abort = core_pb2.EngineCoreServiceAbortRequest(request_ids=pack_uint64([5, 2**64 - 1]), reason=3)  # type: ignore[arg-type]
    assert wire.abort_from_proto(abort) == ([5, 2**64 - 1], AbortReason.STOP_STRING)
    abort.ClearField("reason")
    newer = core_pb2.EngineCoreServiceAbortRequest.FromString(abort.SerializeToString() + b"\x18\x63")
    assert wire.abort_from_proto(newer)[1] is AbortReason.UNSPECIFIED

    message = core_pb2.StreamOutputsRequest()
    message.open.frontend_incarnation = "f"
    message.open.request_ids = pack_uint64([1, 2])
    message.open.num_received = pack_int32([0, 9])
    assert wire.open_from_proto(message) == ("f", {1: 0, 2: 9})
    message.open.num_received = pack_int32([0])
    with pytest.raises(InvalidArgumentError, match=r"open\.num_received"):
        wire.open_from_proto(message)
    message.open.frontend_incarnation = ""
    with pytest.raises(InvalidArgumentError, match=r"open\.frontend_incarnation"):
        wire.open_from_proto(message)
    with pytest.raises(InvalidArgumentError, match="acknowledge"):
        wire.acknowledge_from_proto(message)
    message.acknowledge.sequence = 4
    message.acknowledge.finished_request_ids = pack_uint64([8])
    assert wire.acknowledge_from_proto(message) == (4, [8])
    with pytest.raises(InvalidArgumentError, match="must be open"):
        wire.open_from_proto(message)


def test_outputs() -> None:
    numbers = [f for f in fields(CoreStats) if f.name not in ("is_paused", "detail")]
    outputs = StepOutputs(
        step=4,
        sequence=9,
        request_ids=np.array([1, 2**64 - 1], np.uint64),
        offsets=np.array([3, 0], np.int32),
        num_tokens=np.array([2, 0], np.int32),
        token_ids=np.array([7, 8], np.int32),
        finished=[
            Finished(0, FinishReason.STOP, stop_token_id=0, num_preemptions=1, queue_us=2, prefill_us=3, decode_us=4),
            Finished(1, FinishReason.ERROR, error_code="UNAVAILABLE", error_message="gone"),
        ],
        logprobs={0: make_logprobs(2, 3)},
        prompt_logprobs={1: (5, make_logprobs(4, 1))},
        started={1: 16},
        stats=CoreStats(**{f.name: i + 1 for i, f in enumerate(numbers)}),  # type: ignore[arg-type]
    )
    message = wire.outputs_to_proto(outputs)
    proto = core_pb2.StreamOutputsResponse.FromString(message.SerializeToString()).outputs
    assert (proto.sequence, proto.step) == (9, 4)
    assert unpack_uint64(proto.request_ids).tolist() == [1, 2**64 - 1]
    for name in ("offsets", "num_tokens", "token_ids"):
        assert unpack_int32(getattr(proto, name)).tolist() == getattr(outputs, name).tolist()
    assert proto.finished[0].HasField("stop_token_id") and proto.finished[0].stop_token_id == 0
    assert not proto.finished[1].HasField("stop_token_id")
    assert (proto.finished[0].queue_us, proto.finished[0].prefill_us, proto.finished[0].decode_us) == (2, 3, 4)
    assert proto.finished[1].error_code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert proto.finished[1].reason == types_pb2.FINISH_REASON_ERROR
    assert_same_logprobs(logprob_columns_from_proto(proto.logprobs[0].columns), outputs.logprobs[0])
    assert (proto.prompt_logprobs[0].row, proto.prompt_logprobs[0].start) == (1, 5)
    assert unpack_float32(proto.prompt_logprobs[0].columns.logprobs).shape == (4,)
    assert (proto.started[0].row, proto.started[0].num_cached_tokens) == (1, 16)
    assert core_stats_from_proto(proto.stats) == outputs.stats


@given(st.data())
def test_plan(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(0, 5))

    def draw(length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        values = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
        return np.array(values, np.int32)

    plan = StepPlan(
        epoch=data.draw(uint64),
        step=data.draw(uint64),
        slots=draw(num_rows),
        num_scheduled_tokens=draw(num_rows),
        num_computed_tokens=draw(num_rows),
        num_sampled_tokens=draw(num_rows),
        num_new_blocks=draw(num_rows),
        new_block_ids=draw(3),
        released_slots=draw(2),
        num_draft_tokens=draw(num_rows),
        draft_token_ids=draw(2),
        copy_sources=draw(2),
        copy_destinations=draw(2),
        zero_block_ids=draw(1),
        awaits_grammar_mask=data.draw(st.booleans()),
        trace_context=data.draw(st.sampled_from([None, TraceContext("00-a", "b")])),
        num_drafts_wanted=3,
        new_requests=[
            NewRequest(1, "f", 2**63, draw(4), 3, SamplingParams(seed=5), 2, (0, 9), Adapter("x", 1), 4, None)
        ],
    )
    proto = worker_pb2.StepPlan.FromString(worker_wire.plan_to_proto(plan).SerializeToString())
    assert (proto.epoch, proto.step, proto.num_drafts_wanted) == (plan.epoch, plan.step, 3)
    assert proto.awaits_grammar_mask == plan.awaits_grammar_mask
    assert proto.HasField("trace_context") == (plan.trace_context is not None)
    for field in fields(StepPlan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray) and not field.name.startswith("copy_"):
            assert unpack_int32(getattr(proto, field.name)).tolist() == value.tolist(), field.name
    assert unpack_int32(proto.block_copies.sources).tolist() == plan.copy_sources.tolist()
    assert unpack_int32(proto.block_copies.destinations).tolist() == plan.copy_destinations.tolist()
    new, given_new = proto.new_requests[0], plan.new_requests[0]
    assert (new.slot, new.frontend_incarnation, new.request_id) == (1, "f", 2**63)
    assert (new.num_prompt_tokens, new.child_index, new.prompt_logprobs_start) == (3, 2, 4)
    assert unpack_int32(new.token_ids).tolist() == given_new.token_ids.tolist()
    assert unpack_int32(new.eos_token_ids).tolist() == [0, 9]
    assert sampling_params_from_proto(new.sampling_params) == given_new.sampling_params
    assert (new.adapter.name, new.adapter.version) == ("x", 1)


def test_result_and_failure() -> None:
    message = worker_pb2.StepResult(
        epoch=2,
        step=3,
        slots=pack_int32([4, 1]),
        num_tokens=pack_int32([2, 1]),
        token_ids=pack_int32([7, 8, 9]),
        num_draft_tokens=pack_int32([0, 1]),
        draft_token_ids=pack_int32([5]),
        errors=[worker_pb2.StepResult.SlotError(slot=6, message="nan")],
        timings=worker_pb2.StepResult.Timings(wait_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4, idle_ns=5),
    )
    message.logprobs.add(slot=4, columns=logprob_columns_to_proto(make_logprobs(2, 2)))
    message.prompt_logprobs.add(slot=1, start=3, columns=logprob_columns_to_proto(make_logprobs(3, 1)))
    assert worker_wire.failure_from_proto(message) is None
    result = worker_wire.result_from_proto(message)
    assert (result.epoch, result.step, result.errors) == (2, 3, {6: "nan"})
    assert (result.slots.tolist(), result.num_tokens.tolist(), result.token_ids.tolist()) == ([4, 1], [2, 1], [7, 8, 9])
    assert (result.num_draft_tokens.tolist(), result.draft_token_ids.tolist()) == ([0, 1], [5])
    assert_same_logprobs(result.logprobs[4], make_logprobs(2, 2))
    assert result.prompt_logprobs[1][0] == 3
    assert (result.timings.wait_ns, result.timings.idle_ns) == (1, 5)

    message.token_ids = pack_int32([7])
    with pytest.raises(InternalError, match="does not add up"):
        worker_wire.result_from_proto(message)
    message.failure.code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    message.failure.message = "no memory"
    error = worker_wire.failure_from_proto(message)
    assert isinstance(error, ResourceExhaustedError) and "no memory" in error.message


def test_every_command_and_its_result() -> None:
    request, response = core_pb2.UtilityRequest, core_pb2.UtilityResponse
    stats = CoreStats(num_running=4)
    table: list[tuple[core_pb2.UtilityRequest, object, object, core_pb2.UtilityResponse]] = [
        (
            request(reset_prefix_cache=request.ResetPrefixCache(preempt_running=True)),
            ResetPrefixCache(True),
            3,
            response(reset_prefix_cache=response.ResetPrefixCache(num_preempted=3)),
        ),
        (
            request(pause=request.Pause(mode=core_pb2.PAUSE_MODE_KEEP, reset_prefix_cache=True)),
            Pause(PauseMode.KEEP, True),
            2,
            response(pause=response.Pause(num_aborted=2)),
        ),
        (request(resume=request.Resume()), Resume(), None, response(resume=response.Resume())),
        (request(sleep=request.Sleep(level=2)), Sleep(2), 9, response(sleep=response.Sleep(freed_bytes=9))),
        (request(wake_up=request.WakeUp()), WakeUp(), 4, response(wake_up=response.WakeUp(epoch=4))),
        (request(stats=request.Stats()), GetStats(), stats, response(stats=core_pb2.CoreStats(num_running=4))),
        (
            request(profile=request.Profile(start=True)),
            Profile(True),
            "p",
            response(profile=response.Profile(path="p")),
        ),
    ]
    for message, command, result, answer in table:
        assert wire.command_from_proto(message) == command
        assert wire.command_result_to_proto(command, result) == answer  # type: ignore[arg-type]
    covered = {message.WhichOneof("command") for message, *_ in table}
    everything = {field.name for field in request.DESCRIPTOR.oneofs_by_name["command"].fields}
    assert everything - covered == {"add_adapter", "remove_adapter", "list_adapters"}
    with pytest.raises(UnimplementedError, match="list_adapters"):
        wire.command_from_proto(request(list_adapters=request.ListAdapters()))
    for bad, path in (
        (request(), "command"),
        (request(pause=request.Pause()), "pause.mode"),
        (request(sleep=request.Sleep(level=3)), "sleep.level"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            wire.command_from_proto(bad)
        assert caught.value.violations[0].field == path


def test_kv_events() -> None:
    stored = BlockStored((b"a" * 32, b"b" * 32), b"p" * 32, pack_int32([1, 2, 3, 4]), 2, Adapter("x", 7))
    batch = KvEventBatch(5, 99, (AllBlocksCleared(), stored, BlockRemoved((b"c" * 32,))))
    proto = wire.kv_events_to_proto(batch, "core")
    assert (proto.sequence, proto.time_ns, proto.core_incarnation) == (5, 99, "core")
    assert [event.WhichOneof("event") for event in proto.events] == [
        "all_blocks_cleared",
        "block_stored",
        "block_removed",
    ]
    message = proto.events[1].block_stored
    assert list(message.block_hashes) == list(stored.block_hashes)
    assert unpack_int32(message.token_ids).tolist() == [1, 2, 3, 4]
    assert (message.parent_block_hash, message.block_size, message.adapter.version) == (b"p" * 32, 2, 7)
    assert list(proto.events[2].block_removed.block_hashes) == [b"c" * 32]
