"""What the frontend knows of one completion: a child of its parent request, one request to the core."""

from __future__ import annotations

from collections.abc import Sequence

from frontend_svc.logprobs import LogprobsProcessor
from frontend_svc.outputs import CompletionOutput, PositionLogprobs
from frontend_svc.text_assembler import TextAssembler
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import Finished, FinishReason, LogprobColumns
from pagewire.sampling import SamplingParams


class RequestState:
    """One completion. Text and tokens wait here until the parent takes them; what waits merges by itself."""

    __slots__ = (
        "_assembler",
        "_includes_all",
        "_logprobs",
        "_new_logprobs",
        "_new_text",
        "_new_token_ids",
        "finish_reason",
        "index",
        "num_received",
        "num_tokens",
        "request_id",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: int,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        is_delta: bool,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.num_received = 0
        """Tokens received from the core; the next offset expected."""
        self.num_tokens = 0
        """Tokens that count: all received ones, up to the one that completed a stop string."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._assembler = TextAssembler(tokenizer, prompt_token_ids, params)
        wants_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        self._logprobs = LogprobsProcessor(tokenizer, params.logprobs or 0) if wants_logprobs else None
        self._includes_all = not is_delta
        self._new_text: list[str] = []
        self._new_token_ids: list[int] = []
        self._new_logprobs: list[PositionLogprobs] = []

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, token_ids: Sequence[int], logprobs: LogprobColumns | None, finished: Finished | None) -> bool:
        """Reads one row of a step. Returns whether there is something to show (text, or tokens without text)."""
        self.num_received += len(token_ids)
        has_stop_token = finished is not None and finished.reason is FinishReason.STOP and len(token_ids) > 0
        text, num_kept = self._assembler.add(token_ids, has_stop_token=has_stop_token)
        kept = token_ids if num_kept == len(token_ids) else token_ids[:num_kept]
        self._add_logprobs(kept, logprobs)
        self._new_token_ids += kept
        self.num_tokens += num_kept
        if self._assembler.stop_match is not None:
            self._finish_by_string(text)
            return True
        if finished is None:
            if text:
                self._new_text.append(text)
            return bool(text) or (not self._assembler.has_text and num_kept > 0)
        text += self._assembler.finish()
        if self._assembler.stop_match is not None:
            self._finish_by_string(text)
            return True
        self._new_text.append(text)
        self.finish_reason = finished.reason
        self.stop_reason = finished.stop_token_id if finished.reason is FinishReason.STOP else None
        return True

    def finish(self, reason: FinishReason) -> None:
        """Ends it from this side."""
        self._new_text.append(self._assembler.finish())
        self.finish_reason = reason

    def _finish_by_string(self, text: str) -> None:
        match = self._assembler.stop_match
        assert match is not None
        self._new_text.append(text)
        self.finish_reason = FinishReason.STOP
        self.stop_reason = match.stop

    def _add_logprobs(self, token_ids: Sequence[int], columns: LogprobColumns | None) -> None:
        if self._logprobs is None or not token_ids:
            return
        if columns is None or len(columns) < len(token_ids):
            self._new_logprobs += [self._logprobs.skip(token_id) for token_id in token_ids]
        else:
            self._new_logprobs += self._logprobs.update(columns.rows(0, len(token_ids)))

    def take(self) -> CompletionOutput:
        """What is new since the last take, or everything for cumulative outputs."""
        text = "".join(self._new_text)
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self._new_token_ids,
            logprobs=self._new_logprobs if self._logprobs else None,
            cumulative_logprob=self._logprobs.cumulative_logprob if self._logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if self._includes_all:
            self._new_text = [text]
            output.token_ids = list(self._new_token_ids)
            if output.logprobs is not None:
                output.logprobs = list(output.logprobs)
        else:
            self._new_text, self._new_token_ids, self._new_logprobs = [], [], []
        return output
