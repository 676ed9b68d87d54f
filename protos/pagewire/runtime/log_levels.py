"""What `--log-level` says: a level for all, and others for single loggers, such as `info,core_svc.steps=debug`."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

LEVELS = ("debug", "info", "warning", "error")
SYNTAX = f"{'|'.join(LEVELS)}[,LOGGER=LEVEL ...]"
QUIET = ("numba", "llvmlite", "asyncio", "urllib3", "filelock")
"""Libraries that say thousands of lines at level debug, about themselves: never below info unless they are named."""

_LOGGER = re.compile(r"\w+(\.\w+)*")
_LIMIT = (
    f"must be one of {', '.join(LEVELS)}, and may go on with ,LOGGER=LEVEL for single loggers, "
    "such as info,core_svc.steps=debug"
)


@dataclass(frozen=True, slots=True)
class Levels:
    """The level of everything, and those of loggers by name (and of the loggers below them)."""

    default: str = "info"
    loggers: dict[str, str] = field(default_factory=dict)


def parse_levels(text: str) -> Levels:
    """Reads the flag's value. Raises ValueError with what is allowed."""
    default, loggers = "", {}
    for part in text.split(","):
        name, is_named, level = (piece.strip() for piece in part.rpartition("="))
        level = level.lower()
        if level not in LEVELS:
            raise ValueError(f"{_LIMIT} ({level!r} is no level)" if "," in text or is_named else _LIMIT)
        if is_named and not _LOGGER.fullmatch(name):
            raise ValueError(f"{_LIMIT} ({name!r} is no logger)")
        if (name in loggers) if is_named else default:
            raise ValueError(f"{_LIMIT} ({name or 'the level of all'} is given twice)")
        if is_named:
            loggers[name] = level
        else:
            default = level
    return Levels(default or "info", loggers)


def checked_levels(text: str) -> str:
    """The value as it is, once it is known to be right: for `setting(parse=...)`."""
    parse_levels(text)
    return text


_named: set[str] = set()


def apply_levels(levels: Levels) -> None:
    """Sets the levels of this process's loggers, and takes back what the last call set."""
    for name in _named:
        logging.getLogger(name).setLevel(logging.NOTSET)
    _named.clear()
    logging.getLogger().setLevel(levels.default.upper())
    quiet = dict.fromkeys(QUIET, "info") if levels.default == "debug" else {}
    for name, level in {**quiet, **levels.loggers}.items():
        logging.getLogger(name).setLevel(level.upper())
        _named.add(name)
