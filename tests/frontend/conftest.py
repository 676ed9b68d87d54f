"""Fixtures of the frontend's tests: the real tokenizer of the default model, and small ones made on the spot."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from frontend_svc.chat_template import ChatTemplate
from frontend_svc.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

from small_tokenizers import make_tokenizer, sentencepiece_json, wordpiece_json


@pytest.fixture(params=["inprocess", "grpc"])
def kind(request: pytest.FixtureRequest) -> str:
    """How the frontend reaches its core: the same tests pass both ways."""
    return str(request.param)


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    """transformers' own tokenizer of the default model, to compare with."""
    from worker_svc.models.sources import locate
    from worker_svc.models.tokenizer_files import load_tokenizer

    return load_tokenizer(locate("smollm2"))


@pytest.fixture(scope="session")
def smollm2_files(smollm2_reference: Any) -> Mapping[str, bytes]:
    """The tokenizer files that the worker exports for the default model."""
    from worker_svc.models.tokenizer_files import export_tokenizer

    return export_tokenizer(smollm2_reference)


@pytest.fixture(scope="session")
def smollm2(smollm2_files: Mapping[str, bytes]) -> Tokenizer:
    return Tokenizer(smollm2_files)


@pytest.fixture(scope="session")
def smollm2_template(smollm2_files: Mapping[str, bytes], smollm2: Tokenizer) -> ChatTemplate:
    return ChatTemplate(smollm2_files, smollm2)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return make_tokenizer(sentencepiece_json(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}})


@pytest.fixture(scope="session")
def sentencepiece_without_strip() -> Tokenizer:
    return make_tokenizer(sentencepiece_json(strips=False))


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    return make_tokenizer(wordpiece_json())
