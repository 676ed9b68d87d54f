"""Turns columns of log-probabilities into positions with token texts."""

from __future__ import annotations

import codecs

from frontend_svc.detokenizer import REPLACEMENT
from frontend_svc.outputs import Logprob, PositionLogprobs
from frontend_svc.tokenizer import Tokenizer
from frontend_svc.vocabulary import DecoderKind
from pagewire.engine import LogprobColumns


class TokenTexts:
    """Texts of candidate tokens, in the context of the bytes before them.

    A token that ends a character begun earlier shows that character; one that only begins or continues it shows
    nothing. So the texts of the chosen tokens, one after another, are the output's text.
    """

    __slots__ = ("_has_table", "_pieces", "_tail", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.vocabulary.pieces
        self._has_table = tokenizer.vocabulary.kind is not DecoderKind.WINDOW
        self._tail = b""

    def _piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def chosen(self, token_id: int) -> str:
        """Text of the token that came out; the next position follows it."""
        if not self._has_table:
            return self._tokenizer.token_text(token_id)
        data = self._tail + self._piece(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def rival(self, token_id: int, tail: bytes) -> str:
        """Text of another candidate after the bytes `tail`."""
        if not self._has_table:
            return self._tokenizer.token_text(token_id)
        piece = self._piece(token_id)
        text, _ = codecs.utf_8_decode(tail + piece, "replace", False)
        return piece.decode(errors="replace") if tail and REPLACEMENT in text else text

    @property
    def tail(self) -> bytes:
        """Bytes before the next position that complete no character yet."""
        return self._tail


class LogprobsProcessor:
    """Log-probabilities of consecutive positions of one completion, or of a prompt.

    Args:
        num_logprobs: how many of the likeliest were asked for (-1 for all); candidates beyond them were asked for by
            id and have no rank.
    """

    __slots__ = ("_num_ranked", "_texts", "cumulative_logprob")

    def __init__(self, tokenizer: Tokenizer, num_logprobs: int) -> None:
        self._texts = TokenTexts(tokenizer)
        self._num_ranked = num_logprobs
        self.cumulative_logprob = 0.0

    def update(self, columns: LogprobColumns) -> list[PositionLogprobs]:
        """The positions of these columns, in order."""
        rows = zip(columns.token_ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist(), strict=True)
        return [self._position(ids, logprobs, rank) for ids, logprobs, rank in rows]

    def skip(self, token_id: int) -> PositionLogprobs:
        """A position whose log-probabilities are not known (they were lost with a broken connection)."""
        self._texts.chosen(token_id)
        return {}

    def _position(self, ids: list[int], logprobs: list[float], rank: int) -> PositionLogprobs:
        tail = self._texts.tail
        position = {ids[0]: Logprob(logprobs[0], rank, self._texts.chosen(ids[0]))}
        self.cumulative_logprob += logprobs[0]
        for place in range(1, len(ids)):
            token_id = ids[place]
            if token_id not in position:
                is_ranked = self._num_ranked < 0 or place <= self._num_ranked
                text = self._texts.rival(token_id, tail)
                position[token_id] = Logprob(logprobs[place], place if is_ranked else 0, text)
        return position
