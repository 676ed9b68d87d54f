"""The errors that cross a service's boundary, as plain exceptions.

Domain code raises these; each `server.py` maps them to gRPC status codes with `pagewire.runtime.status`, and each
client maps status codes back. `reason` is the `google.rpc.ErrorInfo` reason (UPPER_SNAKE_CASE).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_VIOLATIONS_TOLD = 32
"""Bad fields that an error's message names; more tell a caller nothing."""


class PagewireError(Exception):
    """Base of all errors that a caller may see."""

    code: ClassVar[str] = "INTERNAL"
    reason: str = "INTERNAL"
    request: object | None = None
    """The request that failed; the public client attaches it."""

    def __init__(self, message: str, *, reason: str | None = None, metadata: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.metadata = metadata or {}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path in the request, what is wrong, and what would be right."""

    field: str
    """Path from the request's root, such as `sampling_params.top_p` or `messages[2].role`."""
    value: str
    """The value found, shortened to 100 characters."""
    limit: str
    """What is allowed, such as `must be in (0, 1]`."""

    @property
    def description(self) -> str:
        return f"{self.field} is {self.value}: {self.limit}"


def violation(field: str, value: object, limit: str) -> FieldViolation:
    """Makes a FieldViolation and shortens the value for display; of text both ends stay: a path's last part matters."""
    if isinstance(value, str) and len(value) > 96:
        value = f"{value[:32]}...{value[-60:]}"
    text = repr(value[:101] if isinstance(value, str | bytes | list | tuple) else value)
    return FieldViolation(field, text if len(text) <= 100 else text[:97] + "...", limit)


class InvalidArgumentError(PagewireError):
    """The caller sent something that no state of the service would accept."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"

    def __init__(self, violations: list[FieldViolation], *, reason: str | None = None) -> None:
        text = "; ".join(v.description for v in violations[:MAX_VIOLATIONS_TOLD])
        num_more = len(violations) - MAX_VIOLATIONS_TOLD
        super().__init__(f"{text}; and {num_more} more" if num_more > 0 else text, reason=reason)
        self.violations = violations


class AlreadyExistsError(PagewireError):
    """The external id belongs to a request that is still alive."""

    code = "ALREADY_EXISTS"
    reason = "REQUEST_ID_IN_USE"


class UnauthenticatedError(PagewireError):
    """The call has no API key, or one that is not known."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class NotFoundError(PagewireError):
    """The named model, adapter or file does not exist."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class FailedPreconditionError(PagewireError):
    """The service is in a state in which the call makes no sense (wrong epoch, fenced peer, stream not open)."""

    code = "FAILED_PRECONDITION"
    reason = "FAILED_PRECONDITION"


class ResourceExhaustedError(PagewireError):
    """A bound was reached: a full queue, a slow reader."""

    code = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float | None = None, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class UnavailableError(PagewireError):
    """A service is not there now: it loads, drains, or died. Retrying later may help."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float | None = None, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class AbortedError(PagewireError):
    """The call was ended by somebody else than its caller."""

    code = "ABORTED"
    reason = "ABORTED"


class DeadlineExceededError(PagewireError):
    """The deadline passed."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class UnimplementedError(PagewireError):
    """The contract has it, this build does not."""

    code = "UNIMPLEMENTED"
    reason = "UNIMPLEMENTED"


class InternalError(PagewireError):
    """A fault of the service itself."""
