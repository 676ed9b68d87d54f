"""Generate and Chat end to end: real gRPC, real engine, fake model, real tokenizer; in process and over gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import pytest
from frontend_support import (
    SEED,
    CoreOptions,
    collect,
    expected_text,
    frontend,
    generate_request,
    ids_of,
    run,
    sampling,
    text_of,
)

from core_svc.config import EngineConfig
from core_svc.fake_executor import FakeOptions
from frontend_svc.chat_template import ChatTemplate
from frontend_svc.tokenizer import Tokenizer
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import types_pb2

Files = Mapping[str, bytes]


def test_deltas_make_the_whole_output(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """Deltas add up to what the model says; only the last may be empty; usage and finish are on the last.

    Case: vllm#13087
    """

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            prompt = smollm2.encode("Hello there")
            messages = await collect(
                f.stub.Generate(generate_request(max_tokens=40, request_id="a", return_prompt_token_ids=True))
            )
            assert ids_of(messages) == f.expected_ids(prompt, 40)
            assert text_of(messages) == expected_text(smollm2, ids_of(messages))
            assert all(o.text for m in messages[:-1] for o in m.outputs)
            assert all(m.outputs and m.request_id == "a" for m in messages)
            assert [m.is_finished for m in messages] == [False] * (len(messages) - 1) + [True]
            last = messages[-1]
            assert last.outputs[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 40)
            # How many messages there are is up to who is faster, engine or reader.
            assert [list(m.prompt_token_ids.ids) for m in messages] == [prompt] + [[]] * (len(messages) - 1)
            await f.is_idle()

    run(scenario())


def test_output_kinds(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """Cumulative messages grow and hold everything; final-only is one message; both equal the deltas."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            ids = f.expected_ids(smollm2.encode("Hello there"), 30)
            text = expected_text(smollm2, ids)
            grown = await collect(
                f.stub.Generate(generate_request(max_tokens=30, output_kind=types_pb2.OUTPUT_KIND_CUMULATIVE))
            )
            for before, after in itertools.pairwise(grown):
                assert after.outputs[0].text.startswith(before.outputs[0].text)
                assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids)
            final = await collect(
                f.stub.Generate(generate_request(max_tokens=30, output_kind=types_pb2.OUTPUT_KIND_FINAL_ONLY, n=2))
            )
            assert len(final) == 1
            assert [o.index for o in final[0].outputs] == [0, 1]
            for output in (grown[-1].outputs[0], final[0].outputs[0]):
                assert (output.text, list(output.token_ids)) == (text, ids)

    run(scenario())


def test_stop_string_ends_the_core_too(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """The frontend finds the string, aborts the core, and shows and counts nothing after it.

    Case: vllm#57052
    """

    async def scenario() -> None:
        # Steps take time, as they do with a real worker: the abort must come long before max_tokens.
        async with frontend(kind, smollm2_files, CoreOptions(options=FakeOptions(latency_s=0.002))) as f:
            ids = f.expected_ids(smollm2.encode("Hello there"), 200)
            text = expected_text(smollm2, ids)
            at = next(
                i
                for i in range(60, len(text) - 9)
                if "\ufffd" not in text[i : i + 9] and text.find(text[i : i + 9]) == i
            )
            stop = text[at : at + 9]
            messages = await collect(f.stub.Generate(generate_request(max_tokens=2000, stop=[stop])))
            last = messages[-1].outputs[0]
            assert text_of(messages) == text[:at]
            assert last.finish_reason == types_pb2.FINISH_REASON_STOP
            assert last.stop_string == stop
            shown = ids_of(messages)
            assert shown == ids[: len(shown)]
            assert stop in expected_text(smollm2, shown)
            assert stop not in expected_text(smollm2, shown[:-1])
            assert messages[-1].usage.completion_tokens == len(shown)
            await f.is_idle()
            assert f.engine.num_steps < 1000
            kept = await collect(
                f.stub.Generate(generate_request(max_tokens=2000, stop=[stop], include_stop_str_in_output=True))
            )
            assert text_of(kept) == text[: at + 9]

    run(scenario())


def test_a_stop_string_wins_over_the_length_limit(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """Found in the last token that max_tokens allows, it is the reason all the same."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            ids = f.expected_ids(smollm2.encode("Hello there"), 60)
            count = next(
                n
                for n in range(20, 60)
                if smollm2.token_text(ids[n - 1]).strip().isalpha() and ids[n - 1] not in ids[: n - 1]
            )
            stop = smollm2.token_text(ids[count - 1])
            if stop in expected_text(smollm2, ids[: count - 1]):
                pytest.fail("choose another seed: the word appears before")
            messages = await collect(f.stub.Generate(generate_request(max_tokens=count, stop=[stop])))
            assert messages[-1].outputs[0].finish_reason == types_pb2.FINISH_REASON_STOP
            assert messages[-1].outputs[0].stop_string == stop

    run(scenario())


def test_stop_token_and_eos(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """A stop token stays in the ids and out of the text; its id is named; end of sequence names nothing."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files, CoreOptions(eos_rate=0.05)) as f:
            prompt = smollm2.encode("Hello there")
            ids = f.expected_ids(prompt, 300)
            cut = ids.index(2)
            messages = await collect(f.stub.Generate(generate_request(max_tokens=300)))
            last = messages[-1].outputs[0]
            assert ids_of(messages) == ids[: cut + 1]
            assert text_of(messages) == expected_text(smollm2, ids[:cut])
            assert last.finish_reason == types_pb2.FINISH_REASON_STOP
            assert last.WhichOneof("stop_reason") is None
            stopped = await collect(f.stub.Generate(generate_request(max_tokens=300, stop_token_ids=[ids[3]])))
            assert ids_of(stopped) == ids[:4]
            assert text_of(stopped) == expected_text(smollm2, ids[:3])
            assert stopped[-1].outputs[0].stop_token_id == ids[3]
            ignoring = await collect(f.stub.Generate(generate_request(max_tokens=cut + 10, ignore_eos=True)))
            assert ids_of(ignoring) == ids[: cut + 10]

    run(scenario())


def test_parallel_sampling(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """n completions stream side by side under one id; usage counts all; one finish each."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            messages = await collect(f.stub.Generate(generate_request(max_tokens=12, n=4)))
            ids = f.expected_ids(smollm2.encode("Hello there"), 12)
            for index in range(4):
                # The fake model knows no child index, so all four say the same.
                assert ids_of(messages, index) == ids
                reasons = [o.finish_reason for m in messages for o in m.outputs if o.index == index]
                assert [r for r in reasons if r] == [types_pb2.FINISH_REASON_LENGTH]
            assert messages[-1].usage.completion_tokens == 48
            await f.is_idle()

    run(scenario())


def test_children_are_told_apart(kind: str, smollm2_files: Files) -> None:
    """Each child goes to the core with its own index, the same seed, and n of 1."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            seen = []
            f.executor.options.while_executing = lambda plan: seen.extend(plan.new_requests)
            await collect(f.stub.Generate(generate_request(n=3, max_tokens=2)))
            await f.is_idle()
            assert sorted(new.child_index for new in seen) == [0, 1, 2]
            assert {new.sampling_params.seed for new in seen} == {SEED}
            assert {new.sampling_params.n for new in seen} == {1}
            assert len({new.request_id for new in seen}) == 3

    run(scenario())


def test_logprobs(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """One entry per token, texts that add up to the output, a sum that is theirs."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            messages = await collect(f.stub.Generate(generate_request(max_tokens=30, logprobs=0)))
            positions = [p for m in messages for o in m.outputs for p in o.logprobs]
            assert [p.candidates[0].token_id for p in positions] == ids_of(messages)
            assert [p.candidates[0].rank for p in positions] == [1] * 30
            total = sum(p.candidates[0].logprob for p in positions)
            assert messages[-1].outputs[0].cumulative_logprob == pytest.approx(total)
            plain = await collect(f.stub.Generate(generate_request(max_tokens=3)))
            assert not plain[-1].outputs[0].HasField("cumulative_logprob")
            assert not any(o.logprobs for m in plain for o in m.outputs)

    run(scenario())


@pytest.mark.parametrize("budget", [16, 2048])
def test_prompt_logprobs(kind: str, budget: int, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """On the first message, every position once, however the prompt was cut; the first has none.

    Case: vllm#14239
    """

    async def scenario() -> None:
        options = CoreOptions(config=EngineConfig(max_num_batched_tokens=budget, max_num_seqs=8))
        async with frontend(kind, smollm2_files, options) as f:
            text = "one two three four five six seven eight nine ten " * 5
            prompt = smollm2.encode(text)
            messages = await collect(f.stub.Generate(generate_request(text, prompt_logprobs=0, n=2)))
            positions = messages[0].prompt_logprobs
            assert [len(p.candidates) for p in positions] == [0] + [1] * (len(prompt) - 1)
            assert [p.candidates[0].token_id for p in positions[1:]] == prompt[1:]
            assert "".join(p.candidates[0].text for p in positions[1:]) == smollm2.decode(prompt)[len("one") :]
            assert not any(m.prompt_logprobs for m in messages[1:])

    run(scenario())


def test_cached_tokens_are_reported(kind: str, smollm2_files: Files) -> None:
    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            text = "a shared prefix of many words " * 20
            first = await collect(f.stub.Generate(generate_request(text)))
            second = await collect(f.stub.Generate(generate_request(text)))
            assert first[-1].usage.cached_tokens == 0
            assert second[-1].usage.cached_tokens >= 96
            assert text_of(first) == text_of(second)

    run(scenario())


def test_chat_uses_the_models_template(
    kind: str, smollm2_files: Files, smollm2: Tokenizer, smollm2_template: ChatTemplate
) -> None:
    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            request = pb.ChatRequest(
                messages=[
                    pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content="Be brief."),
                    pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi 👋"),
                ],
                sampling_params=sampling(),
                return_prompt_token_ids=True,
            )
            messages = await collect(f.stub.Chat(request))
            turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 👋"}]
            prompt = smollm2.encode(smollm2_template.render(turns), add_special_tokens=False)
            assert list(messages[0].prompt_token_ids.ids) == prompt
            assert ids_of(messages) == f.expected_ids(prompt, 8)
            tokenized = await f.stub.Tokenize(
                pb.TokenizeRequest(conversation=pb.TokenizeRequest.Conversation(messages=request.messages))
            )
            assert list(tokenized.token_ids) == prompt

    run(scenario())


def test_many_streams_do_not_mix(kind: str, smollm2_files: Files, smollm2: Tokenizer) -> None:
    """48 concurrent requests, each with its own prompt and seed, each with exactly its own output."""

    async def scenario() -> None:
        options = CoreOptions(config=EngineConfig(max_num_seqs=16, max_num_batched_tokens=64))
        async with frontend(kind, smollm2_files, options) as f:
            texts = [f"Prompt number {i} says" for i in range(48)]
            calls = [
                collect(f.stub.Generate(generate_request(text, seed=i, max_tokens=5 + i % 7)))
                for i, text in enumerate(texts)
            ]
            for i, messages in enumerate(await asyncio.gather(*calls)):
                assert ids_of(messages) == f.expected_ids(smollm2.encode(texts[i]), 5 + i % 7, seed=i)
            await f.is_idle()

    run(scenario())


def test_token_ids_without_text(kind: str, smollm2_files: Files) -> None:
    """Token ids in, token ids out, no text made."""

    async def scenario() -> None:
        async with frontend(kind, smollm2_files) as f:
            prompt = [17, 4, 99, 3000]
            request = generate_request(token_ids=types_pb2.TokenIds(ids=prompt), detokenize=False)
            messages = await collect(f.stub.Generate(request))
            assert ids_of(messages) == f.expected_ids(prompt, 8)
            assert text_of(messages) == ""

    run(scenario())
