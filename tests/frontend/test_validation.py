"""Every bad field is named with its path, value and limit, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from frontend_support import CoreOptions, collect, frontend, generate_request, ids_of, run, sampling, status_of
from grpc_status import rpc_status

from core_svc.config import EngineConfig
from frontend_svc.tokenizer import Tokenizer
from pagewire.errors import InvalidArgumentError
from pagewire.runtime.status import from_rpc_error
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import types_pb2

Files = Mapping[str, bytes]


def ids(*token_ids: int) -> types_pb2.TokenIds:
    return types_pb2.TokenIds(ids=token_ids)


BAD_GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    "empty text": ({"text": ""}, "text"),
    "empty ids": ({"token_ids": ids()}, "token_ids"),
    "id beyond the vocabulary": ({"token_ids": ids(1, 2, 49152)}, "token_ids.ids[2]"),
    "negative id": ({"token_ids": ids(-1)}, "token_ids.ids[0]"),
    "prompt as long as the model": ({"token_ids": ids(*[5] * 256)}, "token_ids"),
    "text as long as the model": ({"text": "a b c d " * 100}, "text"),
    "enormous text": ({"text": "x" * 2_000_000}, "text"),
    "n of 0": ({"n": 0}, "sampling_params.n"),
    "greedy n": ({"n": 2, "temperature": 0}, "sampling_params.n"),
    "temperature": ({"temperature": -0.5}, "sampling_params.temperature"),
    "temperature that is no number": ({"temperature": float("nan")}, "sampling_params.temperature"),
    "top_p": ({"top_p": 0}, "sampling_params.top_p"),
    "top_k": ({"top_k": -2}, "sampling_params.top_k"),
    "min_p": ({"min_p": 1.5}, "sampling_params.min_p"),
    "repetition_penalty": ({"repetition_penalty": 0}, "sampling_params.repetition_penalty"),
    "presence_penalty": ({"presence_penalty": 2.5}, "sampling_params.presence_penalty"),
    "max_tokens": ({"max_tokens": 0}, "sampling_params.max_tokens"),
    "min_tokens": ({"max_tokens": 3, "min_tokens": 4}, "sampling_params.min_tokens"),
    "min_tokens beyond the model": ({"max_tokens": 4000, "min_tokens": 3000}, "sampling_params.min_tokens"),
    "empty stop": ({"stop": ["a", ""]}, "sampling_params.stop[1]"),
    "stop without text": ({"stop": ["a"], "detokenize": False}, "sampling_params.stop"),
    "logit_bias": ({"logit_bias": {50000: 1.0}}, "sampling_params.logit_bias[50000]"),
    "stop_token_ids": ({"stop_token_ids": [60000]}, "sampling_params.stop_token_ids[0]"),
    "logprobs": ({"logprobs": 1000}, "sampling_params.logprobs"),
    "too many prompt logprobs": (
        {"token_ids": ids(*[5] * 200), "prompt_logprobs": -1},
        "sampling_params.prompt_logprobs",
    ),
    "empty bad word": ({"bad_words": [""]}, "sampling_params.bad_words[0]"),
    "long request_id": ({"request_id": "é" * 129}, "request_id"),
    "long cache_salt": ({"cache_salt": "s" * 257}, "cache_salt"),
    "adapter": ({"adapter": "mine"}, "adapter"),
    "media": ({"media": [types_pb2.MediaItem(mime_type="image/png")]}, "media"),
    "structured outputs": (
        {"structured_outputs": types_pb2.StructuredOutputs(json_object=True)},
        "sampling_params.structured_outputs",
    ),
    "output kind": ({"output_kind": 17}, "output_kind"),
}


def test_generate_names_what_is_wrong(kind: str, smollm2_files: Files) -> None:
    """Each bad request gets INVALID_ARGUMENT with the field's path, and a good one works afterwards.

    Case: vllm#16529
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, CoreOptions(max_model_len=256)) as f:
            for name, (values, path) in BAD_GENERATE.items():
                error = await status_of(f.stub.Generate(generate_request(**dict(values))))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
                found = from_rpc_error(error)
                assert isinstance(found, InvalidArgumentError)
                assert [v.field for v in found.violations] == [path], name
                assert all(v.limit and v.value for v in found.violations), name
                assert path in error.details()
            assert f.engine.num_steps == 0
            assert len(ids_of(await collect(f.stub.Generate(generate_request())))) == 8
            await f.is_idle()

    run(scenario())


def test_prompt_must_be_set(smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            error = await status_of(f.stub.Generate(pb.GenerateRequest()))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "prompt" in error.details()

    run(scenario())


def test_several_faults_come_together(smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            error = await status_of(f.stub.Generate(generate_request(top_p=3, min_p=-1, adapter="a")))
            found = from_rpc_error(error)
            assert isinstance(found, InvalidArgumentError)
            assert {v.field for v in found.violations} == {"sampling_params.top_p", "sampling_params.min_p", "adapter"}
            assert rpc_status.from_call(error) is not None

    run(scenario())


def chat(*messages: pb.ChatMessage, **values: Any) -> pb.ChatRequest:
    return pb.ChatRequest(messages=messages, sampling_params=sampling(), **values)


USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (chat(), "messages"),
        (chat(USER, pb.ChatMessage(content="x")), "messages[1].role"),
        (chat(pb.ChatMessage(role=pb.ChatRole.ValueType(9), content="x")), "messages[0].role"),
        (chat(USER, tools_json="{}"), "tools_json"),
        (chat(USER, tools_json="[1]"), "tools_json"),
        (chat(USER, template_kwargs_json="[]"), "template_kwargs_json"),
        (chat(USER, template_kwargs_json="{"), "template_kwargs_json"),
        (chat(USER, template_kwargs_json="[" * 100_000), "template_kwargs_json"),
        (
            chat(pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls_json="7")),
            "messages[0].tool_calls_json",
        ),
        (chat(USER, continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    ],
)
def test_chat_names_what_is_wrong(request_: pb.ChatRequest, path: str, smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend("inprocess", smollm2_files) as f:
            found = from_rpc_error(await status_of(f.stub.Chat(request_)))
            assert isinstance(found, InvalidArgumentError)
            assert [v.field for v in found.violations] == [path]

    run(scenario())


def test_too_large_for_the_pool(kind: str, smollm2_files: Files) -> None:
    """A request that the KV pool can never hold is refused at once and blocks nobody.

    Case: vllm#39734
    """

    async def scenario() -> None:
        options = CoreOptions(num_blocks=9, config=EngineConfig(block_size=16))
        async with frontend(kind, smollm2_files, options) as f:
            error = await status_of(f.stub.Generate(generate_request(token_ids=ids(*[7] * 200))))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(ids_of(await collect(f.stub.Generate(generate_request())))) == 8
            model = await f.stub.GetModel(pb.GetModelRequest())
            assert model.model.info.max_model_len == 8 * 16 + 1
            assert model.model.kv_cache_tokens == 8 * 16

    run(scenario())


def test_models_and_unimplemented(kind: str, smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            models = (await f.stub.ListModels(pb.ListModelsRequest())).models
            assert [m.name for m in models] == ["fake"]
            assert models[0].has_chat_template
            for call in (
                f.stub.Generate(generate_request(model="gpt-5")),
                f.stub.GetModel(pb.GetModelRequest(model="gpt-5")),
                f.stub.Tokenize(pb.TokenizeRequest(model="gpt-5", text="x")),
            ):
                error = await status_of(call)
                assert error.code() is grpc.StatusCode.NOT_FOUND
                assert "fake" in error.details()
            error = await status_of(f.stub.Embed(pb.EmbedRequest(texts=["x"])))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "embeddings" in error.details()

    run(scenario())


def test_tokenize_and_detokenize(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            text = "Hello <|im_end|> 日本 👍"
            response = await f.stub.Tokenize(pb.TokenizeRequest(text=text, return_token_strings=True))
            assert list(response.token_ids) == smollm2.encode(text)
            assert len(response.token_strings) == len(response.token_ids)
            assert response.max_model_len == 4096
            back = await f.stub.Detokenize(pb.DetokenizeRequest(token_ids=response.token_ids))
            assert back.text == text
            plain = await f.stub.Detokenize(
                pb.DetokenizeRequest(token_ids=response.token_ids, skip_special_tokens=True)
            )
            assert plain.text == "Hello  日本 👍"
            found = from_rpc_error(await status_of(f.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 99999]))))
            assert isinstance(found, InvalidArgumentError)
            assert found.violations[0].field == "token_ids[1]"
            assert (await f.stub.Tokenize(pb.TokenizeRequest(text=""))).token_ids == []
            error = await status_of(f.stub.Tokenize(pb.TokenizeRequest()))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(scenario())


def test_bad_words_and_seed_are_resolved(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """The core gets token ids for words, at the start and after a space; a drawn seed; a resolved max_tokens."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, CoreOptions(max_model_len=64)) as f:
            seen: list[Any] = []
            f.executor.options.while_executing = lambda plan: seen.extend(plan.new_requests)
            for _ in range(2):
                request = generate_request(bad_words=["secret"])
                request.sampling_params.ClearField("seed")
                request.sampling_params.ClearField("max_tokens")
                messages = await collect(f.stub.Generate(request))
                assert len(ids_of(messages)) == 62
            params = seen[0].sampling_params
            expected = {tuple(smollm2.encode(word)) for word in ("secret", " secret")}
            assert set(params.bad_words_token_ids) == expected
            assert params.max_tokens == 62
            assert seen[0].sampling_params.seed != seen[1].sampling_params.seed
            assert seen[0].eos_token_ids == (2,)

    run(scenario())


def test_the_cores_refusal_names_the_callers_field(kind: str, smollm2_files: Files) -> None:
    """What only the core checks comes back with the path that the caller wrote."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            client = f.service.session.client
            add = client.add

            async def spoiled(requests: Any) -> None:
                for request in requests:
                    request.sampling_params.n = 3
                await add(requests)

            client.add = spoiled  # type: ignore[method-assign]
            found = from_rpc_error(await status_of(f.stub.Generate(generate_request(n=2))))
            assert isinstance(found, InvalidArgumentError)
            assert [v.field for v in found.violations] == ["sampling_params.n"]
            await f.is_idle()

    run(scenario())
