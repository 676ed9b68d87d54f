"""The public Python client, blocking and asyncio, against real services."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pagewire.client import AsyncClient, Client
from pagewire.client_types import RequestOptions
from pagewire.engine import AbortOutcome, FinishReason
from pagewire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

LONG = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0.0}


def test_generate_streams_and_complete_joins(client):
    parts = list(client.generate("The capital of France is", max_tokens=5, temperature=0))
    assert len(parts) > 1
    assert parts[-1].is_finished
    whole = client.complete("The capital of France is", max_tokens=5, temperature=0)
    assert whole.text == "".join(part.text for part in parts)
    assert "Paris" in whole.text
    assert whole.outputs[0].finish_reason is FinishReason.LENGTH
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(whole.outputs[0].token_ids) == 5


def test_text_and_token_ids_are_the_same_prompt(client):
    ids = client.tokenize("The capital of France is")
    assert client.detokenize(ids) == "The capital of France is"
    by_ids, by_text = (client.complete(p, max_tokens=4, temperature=0) for p in (ids, "The capital of France is"))
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids


def test_chat(client):
    assert client.get_model().has_chat_template
    answer = client.complete_chat(
        [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is 1 + 1?"}],
        temperature=0,
        max_tokens=24,
    )
    assert "2" in answer.text
    assert "<|im_" not in answer.text


def test_several_completions_and_logprobs(client):
    answer = client.complete("Once", max_tokens=3, n=3, seed=7, logprobs=2)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    for output in answer.outputs:
        assert len(output.logprobs) == len(output.token_ids)
        assert output.logprobs[0][0].token_id == output.token_ids[0]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"top_k": 1.5}, "sampling_params.top_k"),
        ({"nonsense": 1}, "sampling_params.nonsense"),
        ({"logit_bias": {10**6: 1.0}}, "sampling_params.logit_bias[1000000]"),
    ],
)
def test_errors_carry_path_and_request(client, sampling, field):
    """What is wrong is named, whether the client or the server finds it.

    Case: vllm#16529
    """
    with pytest.raises(InvalidArgumentError) as caught:
        client.complete("x", **sampling)
    assert caught.value.violations[0].field == field


def test_error_has_the_request(client):
    with pytest.raises(InvalidArgumentError) as caught:
        client.complete("hello", min_p=2.0)
    assert caught.value.request.text == "hello"
    with pytest.raises(NotFoundError):
        client.get_model("no-such-model")


def test_deadline(client):
    with pytest.raises(DeadlineExceededError):
        client.complete("Once upon a time", timeout_s=1.0, **LONG)


def test_abort_from_elsewhere_and_reuse_of_the_id(client):
    """An abort ends the stream; a living id can't be taken twice, an ended one can.

    Case: smg#1351
    Case: vllm#10583
    """
    options = RequestOptions(request_id="same-name")
    stream = client.generate("Once upon a time", options=options, **LONG)
    next(stream)
    with pytest.raises(AlreadyExistsError):
        client.complete("x", options=options, max_tokens=1)
    assert client.abort("same-name", "stranger", "same") == {
        "same-name": AbortOutcome.ABORTED,
        "stranger": AbortOutcome.NOT_FOUND,
        "same": AbortOutcome.NOT_FOUND,
    }
    last = list(stream)[-1]
    assert last.outputs[0].finish_reason is FinishReason.ABORT
    assert last.usage is not None
    assert client.complete("x", options=options, max_tokens=1).usage is not None


def test_closing_ends_a_stream_in_another_thread(deployment):
    client = Client(deployment.address("frontend"))
    failures: list[BaseException] = []
    begun = threading.Event()

    def read():
        try:
            for _ in client.generate("Once upon a time", **LONG):
                begun.set()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert failures


def test_async_client(deployment):
    async def main():
        async with AsyncClient(deployment.address("frontend"), timeout_s=120) as client:
            answers = await asyncio.gather(
                *(client.complete("The capital of France is", max_tokens=4, temperature=0) for _ in range(4)),
                client.complete_chat("Hi", max_tokens=4, temperature=0),
            )
            assert len({answer.text for answer in answers[:4]}) == 1
            assert await client.detokenize(await client.tokenize("a b")) == "a b"
            assert (await client.get_model()).name == "smollm2"
            assert await client.abort("nobody") == {"nobody": AbortOutcome.NOT_FOUND}
            with pytest.raises(InvalidArgumentError):
                await client.complete("x", temperature=-1)

    asyncio.run(main())


def test_no_server():
    started = time.monotonic()
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(UnavailableError, match=r"no frontend answers at 127\.0\.0\.1:1"),
    ):
        client.get_model()
    assert time.monotonic() - started < 10
