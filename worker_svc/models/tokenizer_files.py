"""Exports a model's tokenizer as files that need no torch and no transformers to be read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from pagewire.errors import InvalidArgumentError, violation
from worker_svc.models.sources import ModelFiles

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLING_KEYS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)
_NO_LIMIT = 10**15
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)


def load_tokenizer(files: ModelFiles) -> Any | None:
    """The model's tokenizer, or None where the directory has none. Raises InvalidArgumentError for a broken one."""
    if not files.gguf_file and not any((files.directory / name).is_file() for name in _TOKENIZER_FILES):
        logger.warning("model %s has no tokenizer: no frontend can serve it", files.name)
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.directory, **files.load_args())
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InvalidArgumentError(
            [violation("model", str(files.path), f"its tokenizer can't be read: {error}")], reason="BAD_MODEL_FILES"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidArgumentError(
            [violation("model", str(files.path), f"{type(tokenizer).__name__} can't be converted to a tokenizer.json")],
            reason="UNSUPPORTED_TOKENIZER",
        )
    return tokenizer


def export_tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja by name.

    A model with several templates has them as a list of {name, template} in tokenizer_config.json.
    """
    config: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__}
    for name in _NAMED_TOKENS:
        token = getattr(tokenizer, name, None)
        if token is not None:
            config[name] = str(token)
            config[f"{name}_id"] = getattr(tokenizer, f"{name}_id")
    for name in ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"):
        if isinstance(value := getattr(tokenizer, name, None), bool):
            config[name] = value
    if tokenizer.model_max_length < _NO_LIMIT:
        config["model_max_length"] = tokenizer.model_max_length
    config["model_specific_special_tokens"] = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name not in _NAMED_TOKENS and not isinstance(token, list)
    }
    for name, token in config["model_specific_special_tokens"].items():
        config[name] = token
    exported = {"tokenizer.json": tokenizer.backend_tokenizer.to_str().encode()}
    template = tokenizer.chat_template
    if isinstance(template, str):
        exported["chat_template.jinja"] = template.encode()
    elif isinstance(template, dict):
        config["chat_template"] = [{"name": name, "template": text} for name, text in sorted(template.items())]
    exported["tokenizer_config.json"] = _json(config)
    return exported


def export_generation_config(generation: GenerationConfig) -> bytes:
    """The model's own sampling defaults and special ids as generation_config.json; nobody has applied them."""
    values: dict[str, Any] = generation.to_diff_dict()
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", *_SAMPLING_KEYS)
    return _json({key: values[key] for key in keys if values.get(key) is not None})


def read_generation_config(files: ModelFiles, config: Any) -> GenerationConfig:
    """From generation_config.json where there is one, else from the configuration.

    Raises InvalidArgumentError where the file is broken.
    """
    path = files.directory / "generation_config.json"
    if files.gguf_file or not path.is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(files.directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgumentError(
            [violation("model", str(path), f"can't be read: {error}")], reason="BAD_MODEL_FILES"
        ) from error


def eos_token_ids(generation: GenerationConfig, config: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Ids that end a sequence: the generation configuration's, else the model's, else the tokenizer's.

    What is no token of the model (such as -1 for "none", or an id of a larger relative) can't come out of it and is
    left out: a request that named it would be refused.
    """
    text_config = config.get_text_config()
    for found in (
        generation.eos_token_id,
        getattr(text_config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        listed = list(found) if isinstance(found, list | tuple) else [found]
        ids = [int(i) for i in listed if isinstance(i, int | float) and 0 <= i < text_config.vocab_size]
        if len(ids) < len(listed) and found is not None:
            logger.warning("of the ids %s that end a sequence only %s are tokens of the model", listed, ids)
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


def files_sha256(files: Mapping[str, bytes]) -> str:
    """The identity of a tokenizer, by the formula of pagewire.types_wire.tokenizer_sha256 (that one needs protobuf)."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode()
