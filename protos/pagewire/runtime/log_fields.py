"""What a log line tells beside its message, as named values: `logger.info("...", extra=fields(request_id=...))`.

Names that every service uses alike: `request_id` (as the caller knows it), `step`, `epoch`, `trace_id`, `span_id`.
Never a prompt, an output or a key: lengths and counts instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Value = str | int | float | bool | None

ATTRIBUTE = "fields"
"""Where a LogRecord keeps them."""
HIDDEN_ATTRIBUTE = "json_fields"
"""Where it keeps those that text leaves out."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*")


def fields(**values: Value) -> dict[str, Mapping[str, Value]]:
    """For `extra=`. What is None or an empty text is left out."""
    return {ATTRIBUTE: {name: value for name, value in values.items() if value is not None and value != ""}}


def json_fields(**values: Value) -> dict[str, Mapping[str, Value]]:
    """The same for a message that tells them already: a line of text goes without."""
    return {HIDDEN_ATTRIBUTE: fields(**values)[ATTRIBUTE]}


def trace_ids(traceparent: str | None) -> dict[str, str]:
    """trace_id and span_id out of a W3C traceparent; nothing where there is none, or another thing than that."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    return {} if match is None else {"trace_id": match[1], "span_id": match[2]}
