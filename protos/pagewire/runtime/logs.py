"""One log format for every process, on stderr: time level service[pid] logger: message."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")
_HANDLER_NAME = "pagewire"


def setup_logging(service: str, level: str = "info") -> None:
    """Sends the log of this process to stderr; calling it again replaces service name and level.

    Raises ValueError where `level` is none of LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"log level is {level!r}: must be one of {', '.join(LEVELS)}")
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    text = f"%(asctime)s.%(msecs)03d %(levelname)s {service}[%(process)d] %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(text, datefmt="%Y-%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level.upper())
