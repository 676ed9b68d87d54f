"""What each token id adds to the text, as bytes, read once from a tokenizer.json.

Two families of decoders cover nearly every model: byte-level ones (GPT-2, Llama 3, Qwen, SmolLM2), where a token is a
string of bytes, and SentencePiece ones (Llama 2, Mistral, Gemma), where a token is text or one byte of a fallback
run. Others have no such table, and the detokenizer decodes windows of tokens instead.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class DecoderKind(enum.Enum):
    """How a tokenizer's pieces become text."""

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    WINDOW = "window"
    """Only the tokenizer itself knows; windows of tokens are decoded."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes of every token id.

    `pieces[i]` is what token i adds to the text (empty for ids without a token). `is_byte[i]` marks the tokens of a
    fallback run, each of which stands for one byte.
    """

    kind: DecoderKind
    pieces: tuple[bytes, ...]
    is_byte: frozenset[int]
    special_token_ids: frozenset[int]
    has_leading_strip: bool = False
    """The decoder removes one space at the very start of a text."""
    whole_texts: dict[int, str] = field(default_factory=dict, compare=False, repr=False)
    """Texts of tokens that are no part of a character, for detokenizers to fill in as they meet them."""

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def longest_piece_bytes(self) -> int:
        """No text of N bytes has fewer than N / longest_piece_bytes tokens."""
        return max((len(piece) for piece in self.pieces), default=1) or 1


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: a byte that prints stands for itself, the rest follow 0x100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _replacer(steps: Sequence[Mapping[str, Any]]) -> tuple[Callable[[str], str], bool] | None:
    """How the steps of a SentencePiece decoder change one piece, and whether they strip a leading space."""
    changes: list[tuple[str, str]] = []
    strips = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            changes.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            changes.append((step["replacement"], " "))
            strips = strips or step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and step["stop"] == 0:
            strips = strips or step["start"] == 1
        elif kind not in ("ByteFallback", "Fuse"):
            return None

    def apply(piece: str) -> str:
        for old, new in changes:
            piece = piece.replace(old, new)
        return piece

    return apply, strips


def read_vocabulary(tokenizer_json: Mapping[str, Any], tokens: Mapping[int, str]) -> Vocabulary:
    """The table of a tokenizer.

    Args:
        tokenizer_json: the parsed file.
        tokens: every token by id, added ones too.
    """
    special = frozenset(t["id"] for t in tokenizer_json.get("added_tokens") or [] if t.get("special"))
    steps = _steps(tokenizer_json.get("decoder"))
    kinds = {step["type"] for step in steps}
    size = max(tokens, default=-1) + 1
    pieces = [b""] * size
    is_byte: set[int] = set()
    if kinds == {"ByteLevel"}:
        for token_id, token in tokens.items():
            pieces[token_id] = _byte_level_piece(token)
        return Vocabulary(DecoderKind.BYTE_LEVEL, tuple(pieces), frozenset(), special)
    replacer = _replacer(steps) if steps else None
    if replacer is None:
        for token_id, token in tokens.items():
            pieces[token_id] = token.encode()
        return Vocabulary(DecoderKind.WINDOW, tuple(pieces), frozenset(), special)
    apply, strips = replacer
    for token_id, token in tokens.items():
        byte = _fallback_byte(token) if "ByteFallback" in kinds else None
        if byte is not None:
            is_byte.add(token_id)
            pieces[token_id] = bytes([byte])
        else:
            pieces[token_id] = apply(token).encode()
    return Vocabulary(DecoderKind.BYTE_FALLBACK, tuple(pieces), frozenset(is_byte), special, strips)
