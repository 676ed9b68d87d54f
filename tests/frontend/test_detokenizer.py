"""Incremental detokenization: whole characters only, and the same text as decoding everything at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.detokenizer import make_detokenizer
from frontend_svc.tokenizer import Tokenizer
from frontend_svc.vocabulary import DecoderKind

TEXTS = [
    "Hello, world!\n\n  Indented\ttext.",
    "日本語のテキストと中文字符,한국어도 있습니다。",
    "family 👨‍👩‍👧‍👦 flags 🇩🇪🇯🇵 skin 👍🏽",
    "combining: e\u0301 a\u0308\u0323 नमस्ते ก็",
    "replacement character itself: \ufffd and NUL \x00 end",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🜁🜂🜃 \U0010ffff",
]


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> tuple[list[str], str]:
    detokenizer = make_detokenizer(tokenizer, prompt or [])
    pieces = [detokenizer.decode(token_id) for token_id in token_ids]
    return pieces, "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_characters_survive_streaming(smollm2: Tokenizer, text: str) -> None:
    """CJK, emoji and combining marks come out as they went in, with no U+FFFD of our own making.

    Case: vllm#8627
    """
    token_ids = smollm2.encode(text)
    pieces, whole = stream(smollm2, token_ids)
    assert whole == text
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stream_equals_full_decode(smollm2: Tokenizer, data: st.DataObject) -> None:
    """For random ids, at every prefix: what was shown plus what is held is the decoding of that prefix.

    Case: vllm#17448
    """
    size = len(smollm2.vocabulary)
    token_ids = data.draw(st.lists(st.integers(0, size + 100), max_size=40))
    detokenizer = make_detokenizer(smollm2)
    shown = ""
    for i, token_id in enumerate(token_ids):
        shown += detokenizer.decode(token_id)
        full = smollm2.decode(token_ids[: i + 1], skip_special_tokens=True)
        assert full.startswith(shown)
        assert set(full[len(shown) :]) <= {"\ufffd"}
    assert shown + detokenizer.flush() == smollm2.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stream_of_raw_bytes_equals_full_decode(smollm2: Tokenizer, data: st.DataObject) -> None:
    """The same where most tokens are single bytes, so that most sequences are broken UTF-8."""
    single = [i for i, piece in enumerate(smollm2.vocabulary.pieces) if len(piece) == 1]
    token_ids = data.draw(st.lists(st.sampled_from(single), max_size=60))
    _, whole = stream(smollm2, token_ids)
    assert whole == smollm2.decode(token_ids, skip_special_tokens=True)


def reference_fallback(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The rule for byte runs, written for reading: good characters as they are, every other byte U+FFFD."""
    text, run = "", b""
    vocabulary = tokenizer.vocabulary
    shown = [i for i in token_ids if i < len(vocabulary) and i not in vocabulary.special_token_ids]
    for token_id in [*shown, -1]:
        if token_id in vocabulary.is_byte:
            run += vocabulary.pieces[token_id]
            continue
        while run:
            for size in (1, 2, 3, 4):
                try:
                    text += run[:size].decode()
                    run = run[size:]
                    break
                except UnicodeDecodeError:
                    continue
            else:
                text, run = text + "\ufffd", run[1:]
        if token_id >= 0:
            text += vocabulary.pieces[token_id].decode()
    return text.removeprefix(" ") if vocabulary.has_leading_strip else text


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_byte_fallback_stream(
    sentencepiece: Tokenizer, sentencepiece_without_strip: Tokenizer, data: st.DataObject
) -> None:
    """Byte runs recover from any byte; equal to the library wherever it keeps the good characters of a run."""
    tokenizer = data.draw(st.sampled_from([sentencepiece, sentencepiece_without_strip]))
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer.vocabulary) + 5), max_size=30))
    _, whole = stream(tokenizer, token_ids)
    assert whole == reference_fallback(tokenizer, token_ids)
    library = tokenizer.decode(token_ids, skip_special_tokens=True)
    if library.count("\ufffd") == whole.count("\ufffd"):
        assert whole == library


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_fallback_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    """Any text that the tokenizer keeps comes back whole, and equal to the library's decoding."""
    token_ids = sentencepiece.encode(text)
    _, whole = stream(sentencepiece, token_ids)
    assert whole == sentencepiece.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 6), max_size=20))
def test_window_stream_equals_full_decode(wordpiece: Tokenizer, token_ids: list[int]) -> None:
    """A decoder without a table is streamed over windows."""
    assert wordpiece.vocabulary.kind is DecoderKind.WINDOW
    _, whole = stream(wordpiece, token_ids)
    assert whole == wordpiece.decode(token_ids, skip_special_tokens=True)


def test_output_continues_the_prompt(sentencepiece: Tokenizer, smollm2: Tokenizer) -> None:
    """After a prompt the first space stays, and a character begun in the prompt is completed."""
    token_ids = sentencepiece.encode("hello", add_special_tokens=False)
    assert stream(sentencepiece, token_ids)[1] == "hello"
    assert stream(sentencepiece, token_ids, prompt=[1])[1] == " hello"
    emoji = smollm2.encode("🜁")
    assert len(emoji) > 1
    assert stream(smollm2, emoji[1:], prompt=emoji[:1])[1] == "🜁"


def test_special_tokens_can_stay(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    for skips in (True, False):
        detokenizer = make_detokenizer(smollm2, skip_special_tokens=skips)
        text = "".join(map(detokenizer.decode, token_ids))
        assert text == smollm2.decode(token_ids, skip_special_tokens=skips)
        assert ("<|im_end|>" in text) is not skips


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece", "wordpiece"])
def test_cost_per_token_does_not_grow(name: str, request: pytest.FixtureRequest) -> None:
    """The last thousand of 20,000 tokens cost what the first thousand cost (within noise)."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    token_ids = [1 + i % (len(tokenizer.vocabulary) - 1) for i in range(20_000)]
    detokenizer = make_detokenizer(tokenizer)

    def cost(ids: list[int]) -> float:
        best = float("inf")
        for chunk in (ids[i : i + 250] for i in range(0, len(ids), 250)):
            start = time.perf_counter()
            for token_id in chunk:
                detokenizer.decode(token_id)
            best = min(best, time.perf_counter() - start)
        return best

    first = cost(token_ids[:1000])
    for token_id in token_ids[1000:19_000]:
        detokenizer.decode(token_id)
    assert cost(token_ids[19_000:]) < 8 * first
