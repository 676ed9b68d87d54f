"""One log for every process, on stderr, as text or JSON: our lines, those of libraries, warnings, uncaught exceptions.

Text: `time LEVEL service[pid] logger: message key=value ...`. JSON: see JsonFormatter. gRPC's C core writes its few
lines itself (GRPC_VERBOSITY=NONE silences it): catching them would lose what a crash says last.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pagewire.runtime.log_fields import fields
from pagewire.runtime.log_format import JsonFormatter, TextFormatter
from pagewire.runtime.log_levels import apply_levels, parse_levels

FORMATS = ("auto", "text", "json")
_HANDLER_NAME = "pagewire"
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container")
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_uncaught = logging.getLogger("pagewire.uncaught")


def setup_logging(service: str, level: str = "info", log_format: str = "text") -> None:
    """Sends the log of this process to stderr; calling it again replaces service name, level and format.

    `level`: see parse_levels. `log_format`: one of FORMATS. Raises ValueError where one of them is not that.
    """
    levels = parse_levels(level)
    if log_format not in FORMATS:
        raise ValueError(f"log format is {log_format!r}: must be one of {', '.join(FORMATS)}")
    is_json = log_format == "json" or (log_format == "auto" and is_read_by_machines(sys.stderr))
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(JsonFormatter(service) if is_json else TextFormatter(service))
    root.addHandler(handler)
    apply_levels(levels)
    _catch_everything()


def set_incarnation(incarnation: str) -> None:
    """From now on JSON lines tell which life of the process they are from."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.incarnation = incarnation


def is_read_by_machines(
    stream: TextIO, environ: Mapping[str, str] = os.environ, files: tuple[str, ...] = _CONTAINER_FILES
) -> bool:
    """Whether `auto` means JSON: the stream is no terminal, and this is a container."""
    if stream.isatty():
        return False
    return any(environ.get(name) for name in _CONTAINER_VARIABLES) or any(Path(name).exists() for name in files)


def _catch_everything() -> None:
    """Warnings and what nobody catches become lines of the log. asyncio tells its own through the logger `asyncio`."""
    warnings.showwarning = _log_warning
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread_death
    sys.unraisablehook = _log_unraisable


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if file is not None:
        file.write(warnings.formatwarning(message, category, filename, lineno, line))
        return
    where = fields(category=category.__name__, location=f"{filename}:{lineno}")
    logging.getLogger("py.warnings").warning("%s", message, extra=where)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _uncaught.critical("the process ends by an exception that nobody caught", exc_info=(kind, error, trace))


def _log_thread_death(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit or arguments.exc_value is None:
        return
    name = arguments.thread.name if arguments.thread is not None else "unknown"
    found = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    _uncaught.critical("a thread ended by an exception that nobody caught", exc_info=found, extra=fields(thread=name))


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.exc_value is None:
        return
    found = (unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
    what = unraisable.err_msg or "an exception that could go nowhere"
    _uncaught.error("%s", what, exc_info=found)
