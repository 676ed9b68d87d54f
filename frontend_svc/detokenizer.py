"""Token ids to text, one token at a time, never half a character.

Bytes that do not complete a character are held; bytes that can never become one turn into U+FFFD and the stream goes
on. Each token costs its own bytes, whatever came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from frontend_svc.tokenizer import Tokenizer
from frontend_svc.vocabulary import DecoderKind, Vocabulary

REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 8
_MAX_WINDOW = 64


class Detokenizer(Protocol):
    """An incremental decoder of one completion."""

    def decode(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is still held, as U+FFFD; called once at the end."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for what follows a prompt.

    Without a prompt the output is a text of its own (a SentencePiece decoder drops its first space then); after one it
    continues the prompt, and a character begun in the prompt's last bytes is completed.
    """
    vocabulary = tokenizer.vocabulary
    context = list(prompt_token_ids[-_MAX_CONTEXT:])
    made: Detokenizer
    if vocabulary.kind is DecoderKind.BYTE_LEVEL:
        made = ByteLevelDetokenizer(vocabulary, skip_special_tokens)
    elif vocabulary.kind is DecoderKind.BYTE_FALLBACK:
        made = ByteFallbackDetokenizer(vocabulary, skip_special_tokens, is_start=not context)
    else:
        return WindowDetokenizer(tokenizer, context, skip_special_tokens)
    for token_id in context:
        made.decode(int(token_id))
    return made


class ByteLevelDetokenizer:
    """Tokens are bytes; the text is their UTF-8 decoding.

    Nearly every token is whole characters, and comes where no character is open: its text is looked up.
    """

    __slots__ = ("_decoder", "_is_inside", "_pieces", "_size", "_skipped", "_special", "_whole_texts")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._pieces = vocabulary.pieces
        self._size = len(vocabulary)
        self._skipped: frozenset[int] = vocabulary.special_token_ids if skip_special_tokens else frozenset()
        self._special = vocabulary.special_token_ids
        self._whole_texts = vocabulary.whole_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """A character is begun and not complete."""

    def decode(self, token_id: int) -> str:
        text = None if self._is_inside else self._whole_texts.get(token_id)
        return self._decode_bytes(token_id) if text is None else text

    def _decode_bytes(self, token_id: int) -> str:
        if not 0 <= token_id < self._size or token_id in self._skipped:
            return ""
        was_inside = self._is_inside
        text = self._decoder.decode(self._pieces[token_id])
        self._is_inside = bool(self._decoder.getstate()[0])
        if not (was_inside or self._is_inside or token_id in self._special):
            self._whole_texts[token_id] = text
        return text

    def flush(self) -> str:
        self._is_inside = False
        return self._decoder.decode(b"", True)


class ByteFallbackDetokenizer:
    """Tokens are text, or single bytes of a run whose characters appear as they complete.

    A byte that fits no character becomes one U+FFFD, as in the `tokenizers` library. (That library turns a whole run
    into U+FFFD where any byte of it is wrong; a stream has shown the run's good characters by then, and keeps them.)
    """

    __slots__ = ("_bytes", "_is_byte", "_is_start", "_pieces", "_size", "_skipped", "_strips")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, *, is_start: bool) -> None:
        self._pieces = vocabulary.pieces
        self._size = len(vocabulary)
        self._is_byte = vocabulary.is_byte
        self._skipped: frozenset[int] = vocabulary.special_token_ids if skip_special_tokens else frozenset()
        self._bytes = b""
        self._strips = vocabulary.has_leading_strip
        self._is_start = is_start

    def decode(self, token_id: int) -> str:
        if not 0 <= token_id < self._size or token_id in self._skipped:
            return ""
        if token_id in self._is_byte:
            return self._start(self._add_byte(self._pieces[token_id]))
        text = self.flush() + self._pieces[token_id].decode(errors="replace")
        return self._start(text)

    def _add_byte(self, byte: bytes) -> str:
        self._bytes += byte
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            broken, self._bytes = self._bytes, b""
            if len(broken) == 1:
                return REPLACEMENT
            # The earlier bytes are lost; the last one may begin a character of its own.
            return REPLACEMENT * (len(broken) - 1) + self._add_byte(byte)
        self._bytes = b""
        return text

    def _start(self, text: str) -> str:
        if not self._is_start or not text:
            return text
        self._is_start = False
        return text[1:] if self._strips and text[0] == " " else text

    def flush(self) -> str:
        text = REPLACEMENT * len(self._bytes)
        self._bytes = b""
        return text


class WindowDetokenizer:
    """For decoders without a table: decodes a short window with and without the new token and takes the difference.

    The window starts at a token whose text was complete, so that spaces between tokens come out right; what ends in
    U+FFFD waits for more, up to a bound.
    """

    __slots__ = ("_prefix_idx", "_read_idx", "_skips", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens = context
        self._skips = skip_special_tokens
        self._prefix_idx = 0
        self._read_idx = len(context)

    def _texts(self) -> tuple[str, str]:
        window = self._tokens[self._prefix_idx :]
        known = self._tokens[self._prefix_idx : self._read_idx]
        return (
            self._tokenizer.decode(known, skip_special_tokens=self._skips),
            self._tokenizer.decode(window, skip_special_tokens=self._skips),
        )

    def decode(self, token_id: int) -> str:
        if token_id < 0:
            return ""
        self._tokens.append(token_id)
        known, text = self._texts()
        waits = text.endswith(REPLACEMENT) and len(self._tokens) - self._read_idx < _MAX_WINDOW
        if waits or len(text) <= len(known):
            return ""
        self._tokens = self._tokens[self._read_idx :]
        self._prefix_idx, self._read_idx = 0, len(self._tokens)
        return text[len(known) :]

    def flush(self) -> str:
        known, text = self._texts()
        self._read_idx = len(self._tokens)
        return text[len(known) :]
