"""Malformed messages on every call of the worker: always a status or a failed step, never a dead process."""

import contextlib
import queue

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.columns import pack_int32
from pagewire.v1 import types_pb2, worker_pb2
from tests.worker.mini_core import MiniCore, request
from tests.worker.worker_support import Client, ServerThread, write_tiny_model

FUZZ = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
text = st.text(max_size=20)
small = st.integers(-3, 140)
column = st.one_of(st.binary(max_size=9), st.lists(small, max_size=5).map(pack_int32))
uint32 = st.one_of(st.integers(0, 70), st.integers(0, 2**32 - 1))
uint64 = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
number = st.floats(width=32)
core_id = st.sampled_from(["core-1", "core-1", "core-1", "core-2", "", "x" * 1000])

sampling_params = st.builds(
    types_pb2.SamplingParams,
    temperature=number,
    top_k=st.integers(-(2**31), 2**31 - 1),
    top_p=number,
    min_p=number,
    repetition_penalty=number,
    logit_bias=st.dictionaries(small, number, max_size=2),
    allowed_token_ids=st.lists(small, max_size=2),
    stop_token_ids=st.lists(small, max_size=2),
    seed=uint64,
    logprobs=small,
    prompt_logprobs=small,
    min_tokens=uint32,
)
new_request = st.builds(
    worker_pb2.StepPlan.NewRequest,
    slot=uint32,
    request_id=uint64,
    token_ids=column,
    num_prompt_tokens=uint32,
    sampling_params=st.one_of(st.none(), sampling_params),
    child_index=uint32,
    eos_token_ids=column,
    prompt_logprobs_start=uint32,
    adapter=st.one_of(st.none(), st.builds(types_pb2.AdapterRef, name=text)),
    pooling_params=st.one_of(st.none(), st.none(), st.builds(types_pb2.PoolingParams)),
)


def plan(step):
    """Plans for this step of epoch 1, mostly."""
    return st.builds(
        worker_pb2.StepPlan,
        epoch=st.sampled_from([1, 1, 1, 0, 2, 2**63]),
        step=st.sampled_from([step, step, step, 0, step + 5]),
        released_slots=st.one_of(st.just(b""), column),
        new_requests=st.lists(new_request, max_size=2),
        slots=column,
        num_scheduled_tokens=column,
        num_computed_tokens=column,
        num_sampled_tokens=column,
        num_new_blocks=column,
        new_block_ids=column,
        num_draft_tokens=st.one_of(st.just(b""), column),
        draft_token_ids=st.one_of(st.just(b""), column),
        zero_block_ids=st.one_of(st.just(b""), column),
        block_copies=st.one_of(
            st.none(), st.builds(worker_pb2.StepPlan.BlockCopies, sources=column, destinations=column)
        ),
        num_drafts_wanted=uint32,
    )


mask = st.builds(worker_pb2.GrammarMask, epoch=uint64, step=uint64, slots=column, num_mask_rows=column, mask=column)


@pytest.fixture(scope="module")
def server():
    server = ServerThread()
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def client(server):
    client = Client(server.address)
    yield client
    client.close()


epochs = iter(range(1, 10**6))


def assert_alive(client, model):
    """A core can take the worker, load, and generate."""
    client.handshake()
    client.load(model, load_format="dummy")
    client.utility(wake_up={})
    epoch = max(client.handshake().epoch + 1, next(epochs))
    if epoch >= 2**63:
        client.utility(sleep={"level": 1})
        client.utility(wake_up={})
        epoch = 1
    client.initialize_cache(epoch)
    stream = client.stream(epoch)
    stream.opened()
    core = MiniCore(stream.execute, num_blocks=100, block_size=4, epoch=epoch)
    assert len(core.generate([request([5, 6, 7])], 3)[0]) == 3
    stream.close()


@given(st.data())
@FUZZ
def test_unary_calls(client, server, model, data):
    client.handshake()
    calls = {
        "Handshake": st.builds(
            worker_pb2.WorkerServiceHandshakeRequest,
            core_incarnation=core_id,
            protocol_versions=st.builds(types_pb2.ProtocolVersions, min=uint32, max=uint32),
        ),
        "LoadModel": st.builds(
            worker_pb2.LoadModelRequest,
            core_incarnation=core_id,
            model=st.one_of(st.just(model), st.just(""), st.sampled_from(["./no", "/", "..", "/dev/null", "\0"])),
            dtype=st.integers(0, 9),
            quantization=st.sampled_from(["", "x"]),
            max_model_len=uint32,
            force_generic=st.booleans(),
            load_format=st.sampled_from(["dummy", "", "odd"]),
        ),
        "InitializeCache": st.builds(
            worker_pb2.InitializeCacheRequest,
            core_incarnation=core_id,
            epoch=uint64,
            block_size=uint32,
            num_blocks=uint32,
            memory_bytes=st.sampled_from([0, 1, 10**6, 2**64 - 1]),
            kv_cache_dtype=st.integers(0, 9),
            max_num_seqs=uint32,
            max_num_batched_tokens=uint32,
        ),
        "GetTokenizer": st.builds(worker_pb2.WorkerServiceGetTokenizerRequest, core_incarnation=core_id),
        "Utility": st.builds(
            worker_pb2.WorkerServiceUtilityRequest,
            core_incarnation=core_id,
            sleep=st.builds(worker_pb2.WorkerServiceUtilityRequest.Sleep, level=uint32),
        ),
    }
    name = data.draw(st.sampled_from(sorted(calls)))
    message = data.draw(calls[name])
    try:
        answer = getattr(client.stub, name)(message, timeout=60)
        if name in ("LoadModel", "GetTokenizer"):
            list(answer)
    except grpc.RpcError as error:
        assert error.code() not in (
            grpc.StatusCode.UNKNOWN,
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ), error
    assert_alive(client, model)


@given(st.data())
@FUZZ
def test_execute(client, server, model, data):
    client.handshake()
    client.load(model, load_format="dummy")
    client.utility(sleep={"level": 1})  # forgets the epoch
    client.utility(wake_up={})
    client.initialize_cache(1)
    stream = client.stream(1)
    stream.opened()
    core = MiniCore(stream.execute, num_blocks=100, block_size=4)
    core.generate([request([5, 6, 7]), request([9, 8])], 2)
    with contextlib.suppress(grpc.RpcError, StopIteration, queue.Empty):
        for _ in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["plan", "plan", "plan", "mask", "empty"]))
            if kind == "plan":
                stream.send(worker_pb2.ExecuteRequest(plan=data.draw(plan(core.step + 1))))
                result = stream.message()
                assert result.failure.code in (0, 3, 8, 9, 12), result.failure  # never INTERNAL
                core.step += not result.HasField("failure")
            elif kind == "mask":
                stream.send(worker_pb2.ExecuteRequest(grammar_mask=data.draw(mask)))
            else:
                stream.send(worker_pb2.ExecuteRequest())
    stream.close()
    assert_alive(client, model)


@given(st.binary(max_size=60))
@settings(parent=FUZZ, max_examples=20)
def test_bytes_that_are_no_message(client, server, model, data):
    call = client.channel.unary_unary("/pagewire.v1.WorkerService/Handshake")
    with contextlib.suppress(grpc.RpcError):
        call(data, timeout=10)
    client.handshake()
