"""The frontend's view of a core: an interface that the gRPC client and the in-process engine implement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    EngineInfo,
    EngineRequest,
    StepOutputs,
)


class EngineCoreClient(Protocol):
    """One core, seen from one frontend incarnation.

    Errors: UnavailableError from any call and from `outputs` once the core is lost (its requests are gone then),
    and what the core answers otherwise.
    """

    @property
    def info(self) -> EngineInfo:
        """What the core said at the handshake."""
        ...

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by name, checked by sha256."""
        ...

    async def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hands over requests, all or none."""
        ...

    async def abort(self, request_ids: Sequence[int], reason: AbortReason) -> list[AbortOutcome]:
        """Ends requests; idempotent; one outcome per id."""
        ...

    async def utility(self, command: Command) -> CommandResult:
        """Runs an administrative command."""
        ...

    def outputs(self) -> AsyncIterator[StepOutputs]:
        """Everything that this frontend's requests produce, in order. Iterated once."""
        ...

    async def close(self) -> None:
        """Lets go of the core; what is alive is aborted."""
        ...
