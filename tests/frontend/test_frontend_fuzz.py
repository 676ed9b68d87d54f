"""Whatever message comes, the frontend answers with a status and lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from frontend_support import CoreOptions, collect, frontend, generate_request, ids_of, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.v1 import frontend_pb2 as pb

Files = Mapping[str, bytes]
METHODS: dict[str, Any] = {
    "Generate": pb.GenerateRequest,
    "Chat": pb.ChatRequest,
    "Embed": pb.EmbedRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "Abort": pb.AbortRequest,
    "GetModel": pb.GetModelRequest,
    "ListModels": pb.ListModelsRequest,
}
TEXT = st.one_of(
    st.text(max_size=30), st.sampled_from(["", "[]", "{}", '[{"a":1}]', "null", "{{", "<|im_end|>", "fake"])
)
EDGE_INTEGERS = [0, 1, -1, 2, 127, 128, 49151, 49152, 2**31 - 1, -(2**31), 2**32 - 1, 2**63, 2**64 - 1]


def scalar(field: Any) -> st.SearchStrategy[Any]:
    """Values that a field can hold, edges first."""
    kind = field.type
    if kind in (field.TYPE_STRING,):
        return TEXT
    if kind == field.TYPE_BYTES:
        return st.binary(max_size=20)
    if kind == field.TYPE_BOOL:
        return st.booleans()
    if kind in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 2.0])
    if kind == field.TYPE_ENUM:
        return st.integers(-1, 12)
    low, high = {
        field.TYPE_UINT32: (0, 2**32 - 1),
        field.TYPE_UINT64: (0, 2**64 - 1),
        field.TYPE_INT32: (-(2**31), 2**31 - 1),
        field.TYPE_INT64: (-(2**63), 2**63 - 1),
    }[kind]
    return st.sampled_from([v for v in EDGE_INTEGERS if low <= v <= high]) | st.integers(low, high)


def fill(draw: Any, message: Any, depth: int = 0) -> None:
    """Sets a random part of a message's fields."""
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(0, 2)) != 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            for _ in range(draw(st.integers(0, 2))):
                getattr(message, field.name)[draw(scalar(key))] = draw(scalar(value))
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type is None:
                    getattr(message, field.name).append(draw(scalar(field)))
                elif depth < 3:
                    fill(draw, getattr(message, field.name).add(), depth + 1)
        elif field.message_type is not None:
            if depth < 3:
                getattr(message, field.name).SetInParent()
                fill(draw, getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, draw(scalar(field)))


@st.composite
def calls(draw: Any) -> tuple[str, Any]:
    name = draw(st.sampled_from(sorted(METHODS)))
    message = METHODS[name]()
    fill(draw, message)
    return name, message


def test_any_message_gets_a_status(smollm2_files: Files) -> None:
    """Hundreds of random messages of every method: each ends, and a sound request works after them."""

    async def answer(f: Any, name: str, message: Any) -> None:
        call = getattr(f.stub, name)(message, timeout=5)
        try:
            if hasattr(call, "__aiter__"):
                await collect(call)
            else:
                await call
        except grpc.aio.AioRpcError as error:
            assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (name, message, error)

    async def scenario() -> None:
        async with frontend("grpc", smollm2_files, CoreOptions(max_model_len=64)) as f:
            loop = asyncio.get_running_loop()

            @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
            @given(call=calls())
            def fuzz(call: tuple[str, Any]) -> None:
                asyncio.run_coroutine_threadsafe(answer(f, *call), loop).result(20)

            await asyncio.to_thread(fuzz)
            assert len(ids_of(await collect(f.stub.Generate(generate_request())))) == 8
            await f.is_idle()

    run(scenario(), 240)


def test_bytes_that_are_no_message(smollm2_files: Files) -> None:
    """Broken protobuf and an unknown method get a status too."""

    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            for method in ("Tokenize", "Nonsense"):
                call = f.channel.unary_unary(f"/pagewire.v1.FrontendService/{method}")
                try:
                    await call(b"\xff\xff\xff\xff")
                    raise AssertionError("it was taken")
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
            assert len(ids_of(await collect(f.stub.Generate(generate_request())))) == 8

    run(scenario())
