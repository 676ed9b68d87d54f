"""Log lines: text for people, one JSON object each for machines. What a caller gave can't forge a line in either."""

from __future__ import annotations

import json
import logging
import os
import re
import time
import traceback
from collections.abc import Mapping
from typing import Any

from pagewire.runtime.log_fields import ATTRIBUTE, HIDDEN_ATTRIBUTE, Value

MAX_CHARACTERS = 16_384
"""Of a message, and of a traceback."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NEEDS_QUOTES = re.compile(r"""[\s="'\\]|^$""")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape_control(text: str) -> str:
    """The text on one line: without what ends lines, moves a terminal's cursor, or turns the direction of writing."""
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def fields_of(record: logging.LogRecord, attribute: str = ATTRIBUTE) -> dict[str, Value]:
    """What `extra=fields(...)` gave the record."""
    found = getattr(record, attribute, None)
    return dict(found) if isinstance(found, Mapping) else {}


def message_of(record: logging.LogRecord) -> str:
    """The message; a call whose arguments don't fit its format still gets a line."""
    try:
        return _bounded(record.getMessage())
    except Exception as error:
        return _bounded(f"{record.msg} (its arguments don't fit: {error})")


def _bounded(text: str) -> str:
    """Collectors cut long lines in pieces, and a caller can make an error's text as long as a message."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}... ({len(text) - MAX_CHARACTERS} characters more)"


class TextFormatter(logging.Formatter):
    """`time LEVEL service[pid] logger: message key=value ...`, in local time; a traceback's lines are indented."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"{now}.{int(record.msecs):03d} {record.levelname} {self._service}[{record.process}] {record.name}: "
        message = escape_control(message_of(record))
        pairs = "".join(f" {name}={_text(value)}" for name, value in fields_of(record).items())
        return f"{head}{message}{pairs}{_indented(record)}"


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return escape_control(json.dumps(value, ensure_ascii=False) if _NEEDS_QUOTES.search(value) else value)


def _indented(record: logging.LogRecord) -> str:
    """What follows the line: traceback and stack, each of their lines indented, so that none looks like a line."""
    text = _stack(record)
    return "".join(f"\n    {escape_control(line)}" for line in text.split("\n")) if text else ""


def _stack(record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    if record.stack_info:
        parts.append(record.stack_info)
    return _bounded("\n".join(parts))


class JsonFormatter(logging.Formatter):
    """One object per line: time (RFC 3339, UTC), level, service, pid, incarnation, logger, message, fields, error."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self.incarnation = ""

    def format(self, record: logging.LogRecord) -> str:
        seconds, ms = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)), int(record.msecs)
        line: dict[str, Any] = {
            "time": f"{seconds}.{ms:03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "pid": record.process or os.getpid(),
        }
        if self.incarnation:
            line["incarnation"] = self.incarnation
        line |= {"logger": record.name, "message": message_of(record)}
        # A field must not take the place of what every line has.
        given = fields_of(record) | fields_of(record, HIDDEN_ATTRIBUTE)
        line |= {name: value for name, value in given.items() if name not in line}
        if (error := _error(record)) is not None:
            line["error"] = error
        return json.dumps(_writable(line), ensure_ascii=True, default=str)


def _error(record: logging.LogRecord) -> dict[str, str] | None:
    kind, error = record.exc_info[:2] if record.exc_info else (None, None)
    if kind is None:
        return {"stack": record.stack_info} if record.stack_info else None
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    return {"type": name, "message": _bounded(str(error)), "stack": _stack(record)}


def _writable(value: Any) -> Any:
    """Half surrogates are no text in JSON, infinities and NaN no numbers."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {name: _writable(inner) for name, inner in value.items()}
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
    return value
