"""Text to token ids and back, over the `tokenizers` library and files held in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from frontend_svc.vocabulary import Vocabulary, read_vocabulary
from pagewire.errors import InternalError, InvalidArgumentError, violation

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """One of the files, parsed; empty if it is not there. Raises InternalError where it is no JSON object."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise InternalError(f"the model's {name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InternalError(f"the model's {name} is no JSON object")
    return value


class Tokenizer:
    """A model's tokenizer. Thread-safe: nothing changes after it is made.

    Args:
        files: the exported files by name; tokenizer.json is needed, tokenizer_config.json is used where it is there.

    Raises:
        InvalidArgumentError: the model came without a tokenizer.
        InternalError: the files make no tokenizer.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if TOKENIZER_FILE not in files:
            # Not a fault of ours: a directory of weights and configuration alone loads in the worker.
            limit = f"has no tokenizer: put its {TOKENIZER_FILE} and tokenizer_config.json beside its weights"
            raise InvalidArgumentError([violation("model", sorted(files), limit)], reason="NO_TOKENIZER")
        try:
            self._backend = Backend.from_buffer(files[TOKENIZER_FILE])
        except Exception as error:  # the library raises bare Exception
            raise InternalError(f"the model's {TOKENIZER_FILE} cannot be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.config = read_json(files, CONFIG_FILE)
        tokens = {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}
        self.vocabulary: Vocabulary = read_vocabulary(read_json(files, TOKENIZER_FILE), tokens)
        self._tokens = tokens
        self._longest_piece_bytes = self.vocabulary.longest_piece_bytes

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """Named special tokens of the configuration (bos_token, eos_token, ...), as chat templates see them."""
        named: dict[str, Any] = {}
        for name in (*_SPECIAL_TOKEN_NAMES, *self.config.get("model_specific_special_tokens", {})):
            value = self.config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                named[name] = value
        return named

    def check_size(self, text: str, max_model_len: int, field: str) -> None:
        """Refuses a text that is too long whatever its tokens are, without tokenizing it.

        A token stands for at most `longest_piece_bytes` bytes, so this never refuses a text that would fit.
        """
        limit = max_model_len * self._longest_piece_bytes
        if len(text) * 4 <= limit:
            return
        size = len(text.encode(errors="replace"))
        if size > limit:
            limit_text = (
                f"must have at most {limit} bytes: the model takes {max_model_len} tokens of at most "
                f"{self._longest_piece_bytes} bytes"
            )
            raise InvalidArgumentError([violation(field, f"{size} bytes", limit_text)])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Slow for a long text and free of the interpreter lock: call it off the event loop."""
        # encode_batch, unlike encode, releases the interpreter lock.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of the ids. Ids without a token add nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; holds U+FFFD where the token is part of a character."""
        return self.decode([token_id])

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty if there is none."""
        return self._tokens.get(token_id, "")
