"""What a caller sends too much of is refused by its size, and reading it never holds up the event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from frontend_support import frontend, generate_request, run, status_of

from frontend_svc import wire
from frontend_svc.service import MAX_DETOKENIZE_IDS
from frontend_svc.tokenizer import Tokenizer
from pagewire.errors import InvalidArgumentError, NotFoundError
from pagewire.runtime.status import from_rpc_error, to_status
from pagewire.sampling_wire import sampling_params_from_proto
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import types_pb2

Files = Mapping[str, bytes]
USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")

TOO_MANY: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [1] * (2**20 + 1)},
    "logit_bias": {"logit_bias": dict.fromkeys(range(2**18 + 1), 1.0)},
    "bad_words": {"bad_words": ["x"] * 1025},
    "bad_words_token_ids": {"bad_words_token_ids": [types_pb2.TokenIds(ids=[1])] * 1025},
    "bad_words_token_ids[0].ids": {"bad_words_token_ids": [types_pb2.TokenIds(ids=[1] * 1025)]},
    "stop": {"stop": [""] * 65},
    "stop_token_ids": {"stop_token_ids": [-1] * 1025},
    "logprob_token_ids": {"logprob_token_ids": [1] * 129},
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_list_that_is_too_long_is_one_violation(name: str) -> None:
    """The length tells; the entries are not read."""
    with pytest.raises(InvalidArgumentError) as caught:
        sampling_params_from_proto(types_pb2.SamplingParams(**TOO_MANY[name]))
    (found,) = caught.value.violations
    assert found.field == f"sampling_params.{name}"
    assert "at most" in found.limit


def test_a_message_of_megabytes_becomes_a_short_status_at_once() -> None:
    """An error that quotes what a caller sent is cut before it is encoded, not step by step."""
    started = time.monotonic()
    status = to_status(NotFoundError("x" * 20_000_000, metadata={"model": "y" * 20_000_000}))
    assert time.monotonic() - started < 1.0
    assert len(status.details) <= 1500 and status.details.endswith("...")


def test_token_ids_are_not_copied_before_they_are_counted() -> None:
    request = pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1, 2, 3]))
    assert not isinstance(wire.text_request_from_generate(request, None, None).prompt, list)


def test_many_violations_make_a_short_message() -> None:
    params = types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(60_000, 70_000), 1.0))
    error = InvalidArgumentError(sampling_params_from_proto(params).violations(49152))
    assert error.message.endswith("and 9968 more")
    assert len(error.violations) == 10_000


def test_too_much_is_refused_with_path_and_limit(smollm2_files: Files) -> None:
    """Case: vllm#24910"""
    too_many_ids = types_pb2.TokenIds(ids=[1] * 3_000_000)
    calls: dict[str, tuple[str, Any]] = {
        "token_ids": ("Generate", generate_request(token_ids=too_many_ids)),
        "messages": ("Chat", pb.ChatRequest(messages=[USER] * (wire.MAX_MESSAGES + 1))),
        "tools_json": ("Chat", pb.ChatRequest(messages=[USER], tools_json="[" + " " * wire.MAX_JSON_BYTES + "]")),
        "request_ids": ("Abort", pb.AbortRequest(request_ids=["x"] * 5000)),
        "conversation.messages": (
            "Tokenize",
            pb.TokenizeRequest(conversation=pb.TokenizeRequest.Conversation(messages=[USER] * (wire.MAX_MESSAGES + 1))),
        ),
    }

    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            for path, (method, request) in calls.items():
                error = await status_of(getattr(f.stub, method)(request))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, path
                found = from_rpc_error(error)
                assert isinstance(found, InvalidArgumentError)
                assert [v.field for v in found.violations] == [path]
                assert found.violations[0].limit
            request = pb.DetokenizeRequest(token_ids=[1] * (MAX_DETOKENIZE_IDS + 1))
            error = await status_of(f.stub.Detokenize(request))
            assert f"at most {MAX_DETOKENIZE_IDS} ids" in str(error.details())
            assert (await f.stub.Detokenize(pb.DetokenizeRequest(token_ids=[28] * 10))).text
            long_name = await status_of(f.stub.GetModel(pb.GetModelRequest(model="m" * 3_000_000)))
            assert long_name.code() is grpc.StatusCode.NOT_FOUND

    run(scenario())


def test_slow_work_runs_on_threads(smollm2_files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token texts, decoding and big conversations stay off the event loop.

    Case: vllm#24910
    """
    threads: dict[str, str] = {}

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*args, **more)

        return call

    monkeypatch.setattr(Tokenizer, "token_text", noted("token_text", Tokenizer.token_text))
    monkeypatch.setattr(Tokenizer, "decode", noted("decode", Tokenizer.decode))
    monkeypatch.setattr(wire, "text_request_from_chat", noted("chat", wire.text_request_from_chat))

    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            answer = await f.stub.Tokenize(pb.TokenizeRequest(text="Hello there", return_token_strings=True))
            assert list(answer.token_strings) == ["Hello", " there"]
            await f.stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
            big = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x " * 50_000)
            await status_of(f.stub.Chat(pb.ChatRequest(messages=[big])))

    run(scenario())
    assert set(threads) == {"token_text", "decode", "chat"}
    assert all(name.startswith("tokenize") for name in threads.values()), threads
