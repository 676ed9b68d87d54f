"""What may watch a frontend's requests (metrics, traces), and what it is told: when one comes and when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from frontend_svc.input_processor import Conversation, TextRequest
from frontend_svc.outputs import OutputKind, RequestOutput
from frontend_svc.parallel_sampling import ParentRequest
from pagewire.engine import AbortReason
from pagewire.errors import PagewireError


@dataclass(slots=True)
class RequestTimeline:
    """A caller's request from its arrival to its end. Times are monotonic nanoseconds; 0: it did not get there."""

    request: TextRequest
    """As it came; `request_id` is set where the caller gave none."""
    model: str
    """The served model's name; empty where there was none."""
    api_key: str = ""
    """Name of the caller's key; empty where none is asked for."""
    received_ns: int = field(default_factory=time.monotonic_ns)
    tokenize_ns: int = 0
    """When tokenizing began."""
    tokenized_ns: int = 0
    added_ns: int = 0
    """When the core had it."""
    core: str = ""
    """Address of the core that took it."""
    ended_ns: int = 0
    parent: ParentRequest | None = None
    """Its completions, usage, finish reasons and the time of its first token; None where it was refused before."""
    abort_reason: AbortReason | None = None
    """Set where this frontend ended it before its completions had ended by themselves."""
    error: BaseException | None = None
    """What the caller got; CancelledError where it went away."""
    texts: dict[int, str] | None = None
    """What each completion said, by its index. Kept only where an observer sets it to an empty dict as it begins."""

    def keep_text(self, output: RequestOutput) -> None:
        """Notes what an output says, if texts are kept."""
        if self.texts is not None:
            is_delta = self.request.output_kind is OutputKind.DELTA
            for completion in output.outputs:
                before = self.texts.get(completion.index, "") if is_delta else ""
                self.texts[completion.index] = before + completion.text

    @property
    def status_code(self) -> str:
        """Name of the gRPC status that its call ended with; one answer for metrics, traces and logs."""
        if self.error is None:
            return "OK"
        if isinstance(self.error, PagewireError):
            return self.error.code
        if isinstance(self.error, asyncio.CancelledError):
            return "DEADLINE_EXCEEDED" if self.abort_reason is AbortReason.DEADLINE else "CANCELLED"
        return "INTERNAL"

    @property
    def operation(self) -> str:
        """gen_ai.operation.name of OpenTelemetry's conventions."""
        return "chat" if isinstance(self.request.prompt, Conversation) else "text_completion"


class RequestObserver(Protocol):
    """Watches requests on the event loop; must neither block nor raise."""

    def began(self, timeline: RequestTimeline) -> None:
        """A request came, and nothing is known to be wrong yet. May set the trace context that the core gets."""
        ...

    def ended(self, timeline: RequestTimeline) -> None:
        """It ended, one way or another; called once for each request that began."""
        ...


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[RequestObserver] = ()) -> None:
        self._observers = tuple(observers)

    def began(self, timeline: RequestTimeline) -> None:
        """Tells them in order."""
        for observer in self._observers:
            observer.began(timeline)

    def ended(self, timeline: RequestTimeline) -> None:
        """Notes when, and tells them in reverse order."""
        timeline.ended_ns = time.monotonic_ns()
        for observer in reversed(self._observers):
            observer.ended(timeline)
