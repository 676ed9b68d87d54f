"""The tokenizer's files as they are exported at load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pagewire.errors import InvalidArgumentError
from pagewire.types_wire import tokenizer_sha256
from worker_svc.models.loader import load_model
from worker_svc.models.tokenizer_files import files_sha256


@pytest.fixture
def directory(tiny_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_directory("llama"), tmp_path / "model"))


def word_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=77
    )


def test_one_template(directory: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer.save_pretrained(directory)
    loaded = load_model(str(directory))
    files = loaded.tokenizer_files
    assert files["chat_template.jinja"].decode() == tokenizer.chat_template
    assert Tokenizer.from_buffer(files["tokenizer.json"]).encode("hello world").ids == [0, 3, 4]
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["bos_token_id"], config["eos_token"], config["eos_token_id"]) == (
        "<s>",
        0,
        "</s>",
        1,
    )
    assert config["model_max_length"] == 77
    assert loaded.info.tokenizer_sha256 == tokenizer_sha256(files)


def test_named_templates(directory: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(directory)
    files = load_model(str(directory)).tokenizer_files
    assert "chat_template.jinja" not in files
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    assert all("/" not in name for name in files)


def test_eos_falls_back_to_the_tokenizer(directory: Path) -> None:
    word_tokenizer().save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**values, "eos_token_id": None}))
    assert load_model(str(directory)).info.eos_token_ids == (1,)


def test_no_tokenizer(directory: Path) -> None:
    """A model without one loads; the frontend says what is missing."""
    assert set(load_model(str(directory)).tokenizer_files) == {"generation_config.json"}


def test_broken_tokenizer_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="its tokenizer can't be read"):
        load_model(str(directory))


def test_identity_is_the_wire_s() -> None:
    files = {"b": b"2", "a": b"1"}
    assert files_sha256(files) == tokenizer_sha256(files) != files_sha256({"a": b"2", "b": b"1"})
