"""Token ids equal transformers' for real and special texts; a text that cannot fit is not even tokenized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import sentencepiece_json

from frontend_svc.tokenizer import Tokenizer
from frontend_svc.vocabulary import DecoderKind
from pagewire.errors import InternalError, InvalidArgumentError

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "日本語 👍🏽 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "tab\t\r\n  x\x00y",
    "a" * 500,
]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_transformers_does(text: str, adds: bool, smollm2: Tokenizer, smollm2_reference: Any) -> None:
    expected = smollm2_reference(text, add_special_tokens=adds)["input_ids"]
    assert smollm2.encode(text, add_special_tokens=adds) == expected
    assert smollm2.decode(expected) == smollm2_reference.decode(expected)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_as_transformers_does(text: str, smollm2: Tokenizer, smollm2_reference: Any) -> None:
    """Also for bytes that the model's vocabulary lacks, which are lost."""
    ids = smollm2.encode(text)
    assert ids == smollm2_reference(text)["input_ids"]
    assert smollm2.decode(ids) == smollm2_reference.decode(ids)


@pytest.mark.parametrize("adds", [True, False])
def test_beginning_of_sequence_token(adds: bool, sentencepiece: Tokenizer, tmp_path: Path) -> None:
    """A tokenizer that adds BOS adds it exactly where transformers does."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece_json()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = sentencepiece.encode("hello wörld", add_special_tokens=adds)
    assert ids == reference("hello wörld", add_special_tokens=adds)["input_ids"]
    assert (ids[0] == 1) is adds
    assert sentencepiece.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}


def test_too_long_a_text_is_not_tokenized(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size alone tells; a text that could fit is never refused by it.

    Case: vllm#24910
    """
    longest = smollm2.vocabulary.longest_piece_bytes
    smollm2.check_size("x" * (longest * 10), 10, "text")
    smollm2.check_size("日" * (longest * 10 // 3), 10, "text")
    with pytest.raises(InvalidArgumentError) as caught:
        smollm2.check_size("x" * (longest * 10 + 1), 10, "text")
    assert caught.value.violations[0].field == "text"
    piece = max(smollm2.vocabulary.pieces, key=len).decode()
    assert len(smollm2.encode(piece * 10)) <= 10
    smollm2.check_size(piece * 10, 10, "text")


def test_kinds_of_decoders(smollm2: Tokenizer, sentencepiece: Tokenizer, wordpiece: Tokenizer) -> None:
    kinds = [t.vocabulary.kind for t in (smollm2, sentencepiece, wordpiece)]
    assert kinds == [DecoderKind.BYTE_LEVEL, DecoderKind.BYTE_FALLBACK, DecoderKind.WINDOW]
    assert smollm2.vocabulary.special_token_ids >= {0, 1, 2}


@pytest.mark.parametrize(
    "files",
    [{"tokenizer.json": b"{"}, {"tokenizer.json": b"{}"}, {"tokenizer.json": b"\xff"}],
)
def test_broken_files(files: dict[str, bytes]) -> None:
    with pytest.raises(InternalError, match=r"tokenizer\.json"):
        Tokenizer(files)


@pytest.mark.parametrize("files", [{}, {"generation_config.json": b"{}"}])
def test_a_model_without_tokenizer_says_what_is_missing(files: dict[str, bytes]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"put its tokenizer\.json"):
        Tokenizer(files)
