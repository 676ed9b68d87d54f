"""One completion's text: detokenizer, stop strings and what is held back, joined."""

from __future__ import annotations

from collections.abc import Sequence

from frontend_svc.detokenizer import Detokenizer, make_detokenizer
from frontend_svc.stop import StopChecker, StopMatch
from frontend_svc.tokenizer import Tokenizer
from pagewire.sampling import SamplingParams


class TextAssembler:
    """Takes tokens, gives text that will not be taken back.

    Tokens before min_tokens never stop; text made before may begin a stop string that ends later, as in vLLM V1.
    """

    __slots__ = ("_checker", "_detokenizer", "_held", "_includes_stop", "_min_tokens", "_num_tokens", "stop_match")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = make_detokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._checker = StopChecker(params.stop) if params.stop and params.detokenize else None
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stop_match: StopMatch | None = None

    @property
    def has_text(self) -> bool:
        return self._detokenizer is not None

    def add(self, token_ids: Sequence[int], *, has_stop_token: bool = False) -> tuple[str, int]:
        """Reads new tokens.

        Args:
            token_ids: the tokens.
            has_stop_token: the last one ended the sequence; its text shows only with include_stop_str_in_output.

        Returns:
            The text to show and how many of the tokens count; fewer than given where a stop string ended in one.
        """
        if self._detokenizer is None:
            self._num_tokens += len(token_ids)
            return "", len(token_ids)
        if self._checker is None and not has_stop_token:
            self._num_tokens += len(token_ids)
            return "".join(map(self._detokenizer.decode, token_ids)), len(token_ids)
        num_silent = 1 if has_stop_token and not self._includes_stop else 0
        last = len(token_ids) - num_silent
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            text = self._detokenizer.decode(token_id) if i < last else ""
            if text and self._check(text):
                return self._take_all(), i + 1
        return self._take(), len(token_ids)

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        if self._detokenizer is not None and self.stop_match is None:
            text = self._detokenizer.flush()
            if text:
                self._check(text)
        return self._take_all()

    def _check(self, text: str) -> bool:
        """Adds text; True where a stop string ended in it."""
        match = self._checker.check(text, counts=self._num_tokens > self._min_tokens) if self._checker else None
        if match is None:
            self._held += text
            return False
        self.stop_match = match
        cut = len(self._held) + (match.end if self._includes_stop else match.start)
        self._held = (self._held + text)[:cut]
        return True

    def _take(self) -> str:
        num_held = self._checker.num_held if self._checker and not self._includes_stop else 0
        if not num_held:
            return self._take_all()
        cut = len(self._held) - num_held
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _take_all(self) -> str:
        text, self._held = self._held, ""
        return text
