"""Small tokenizers of the families that the default model's is not of, written out by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping

from frontend_svc.tokenizer import Tokenizer


def sentencepiece_json(*, adds_bos: bool = True, strips: bool = True) -> dict[str, object]:
    """A Llama-2-like tokenizer: BPE over ▁ with byte fallback, written out by hand."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "é", "語", "lo", "he", "▁he", "▁w"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: i for i, name in enumerate(names)}
    added = [
        {
            "id": vocab[name],
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for name in ("<unk>", "<s>", "</s>")
    ]
    single: list[object] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if adds_bos:
        single.insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    decoders: list[object] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [["l", "o"], ["h", "e"], ["▁", "he"], ["▁", "w"]],
        },
    }


def wordpiece_json() -> dict[str, object]:
    """A BERT-like tokenizer, whose decoder has no table of bytes."""
    names = ["[UNK]", "hello", "world", "##s", "!", "un", "##happy"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {name: i for i, name in enumerate(names)},
        },
    }


def make_tokenizer(tokenizer_json: Mapping[str, object], config: Mapping[str, object] | None = None) -> Tokenizer:
    return Tokenizer(
        {
            "tokenizer.json": json.dumps(tokenizer_json).encode(),
            "tokenizer_config.json": json.dumps(config or {}).encode(),
        }
    )
