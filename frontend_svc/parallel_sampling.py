"""A caller's request as parent of its n completions, with the mailbox through which the caller gets outputs.

The mailbox holds no list of messages: children keep what is new, and a caller that comes late gets it merged into one
message. So it is bounded by what the request may generate, and a caller that falls too far behind is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frontend_svc.logprobs import LogprobsProcessor
from frontend_svc.outputs import CompletionOutput, OutputKind, PositionLogprobs, RequestOutput, Usage
from frontend_svc.request_state import RequestState
from pagewire.engine import FinishReason, LogprobColumns
from pagewire.errors import PagewireError


class ParentRequest:
    """A caller's request. It ends once: when all children have, or with an error."""

    def __init__(
        self,
        external_request_id: str,
        prompt_token_ids: Sequence[int],
        output_kind: OutputKind,
        *,
        prompt: str | None = None,
        prompt_logprobs: LogprobsProcessor | None = None,
        returns_prompt_token_ids: bool = False,
    ) -> None:
        self.external_request_id = external_request_id
        self.children: list[RequestState] = []
        self.error: PagewireError | None = None
        self.num_cached_tokens = 0
        self.first_token_ns = 0
        """When the first token of any completion came; monotonic."""
        self._kind = output_kind
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._returns_prompt_token_ids = returns_prompt_token_ids
        self._prompt_processor = prompt_logprobs
        self._prompt_logprobs: list[PositionLogprobs] = [{}]
        self._changed: dict[int, RequestState] = {}
        self.is_ready = False
        """There is something to take: an output, or the error that ended the request."""
        self._on_ready: Callable[[], None] | None = None
        self._has_sent = False
        self._has_ended = False
        self._num_unfinished = 0
        self.num_behind = 0
        """Tokens that came while an earlier message was waiting for the caller."""

    def add_child(self, child: RequestState) -> None:
        self.children.append(child)
        self._num_unfinished += 1

    @property
    def is_finished(self) -> bool:
        """Nothing more comes from the core for it."""
        return self.error is not None or self._num_unfinished == 0

    @property
    def has_ended(self) -> bool:
        """The caller has taken its last output."""
        return self._has_ended

    @property
    def usage(self) -> Usage:
        """Tokens spent so far, aborted or not."""
        num_completion_tokens = sum(child.num_tokens for child in self.children)
        return Usage(len(self._prompt_token_ids), num_completion_tokens, self.num_cached_tokens)

    def mark(self, child: RequestState, num_new_tokens: int = 0) -> None:
        """A child has something to show."""
        if self.is_ready:
            self.num_behind += num_new_tokens
        if child.finish_reason is not None:
            self._num_unfinished -= 1
        self._changed[child.index] = child
        if not self.is_ready:
            self._notify()

    def add_prompt_logprobs(self, start: int, columns: LogprobColumns) -> bool:
        """Takes log-probabilities of prompt positions from `start` on. False where positions are missing before."""
        have = len(self._prompt_logprobs)
        if self._prompt_processor is None or start + len(columns) <= have:
            return True
        if start > have:
            return False
        self._prompt_logprobs += self._prompt_processor.update(columns.rows(have - start))
        return True

    def fail(self, error: PagewireError) -> None:
        """Ends it with an error, once; what waits is dropped."""
        if not self.is_finished:
            self.error = error
            self._ring()

    def finish_children(self, reason: FinishReason) -> None:
        """Ends every child that still lives."""
        for child in self.children:
            if not child.is_finished:
                child.finish(reason)
                self.mark(child)

    def _notify(self) -> None:
        if self._num_unfinished:
            if self._kind is OutputKind.FINAL_ONLY:
                return
            # The prompt's log-probabilities belong to the first message: a sibling may be ahead of the child that
            # computes them.
            if self._prompt_processor is not None and len(self._prompt_logprobs) < len(self._prompt_token_ids):
                return
        self._ring()

    def _ring(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            if self._on_ready is not None:
                self._on_ready()

    def listen(self, on_ready: Callable[[], None] | None) -> None:
        """Calls `on_ready` whenever there is something to take, now or later; None ends that. For one listener."""
        self._on_ready = on_ready
        if on_ready is not None and self.is_ready:
            on_ready()

    def take(self) -> RequestOutput:
        """What is there now; to be called once it `is_ready`."""
        output = RequestOutput(
            self.external_request_id, [child.take() for child in self._changed.values()], self._prompt
        )
        self._changed = {}
        self.num_behind = 0
        self.is_ready = False
        if not self._has_sent:
            self._has_sent = True
            if self._returns_prompt_token_ids:
                output.prompt_token_ids = list(self._prompt_token_ids)
            if self._prompt_processor is not None:
                output.prompt_logprobs = self._prompt_logprobs
        if not self._num_unfinished:
            output.outputs.sort(key=lambda completion: completion.index)
            output.finished = self._has_ended = True
            output.usage = self.usage
        return output

    def failed_output(self) -> RequestOutput:
        """What stands for a request that failed, among others that did not."""
        completions = [CompletionOutput(c.index, "", [], finish_reason=FinishReason.ERROR) for c in self.children]
        output = RequestOutput(self.external_request_id, completions, self._prompt, finished=True, error=self.error)
        output.prompt_token_ids, output.usage = list(self._prompt_token_ids), self.usage
        return output

    def take_ready(self) -> RequestOutput:
        """What is there, once `is_ready`. Raises the error that ended the request."""
        if self.error is not None:
            self._has_ended = True
            raise self.error
        return self.take()
