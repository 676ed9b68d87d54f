"""`python -m frontend_svc`: one frontend process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from frontend_svc.api_keys import ApiKeys
from frontend_svc.server import serve
from frontend_svc.settings import FrontendSettings
from pagewire.runtime.lifetime import die_with_parent, end_on_signals
from pagewire.runtime.logs import setup_logging
from pagewire.runtime.settings import parse_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal; returns the exit status."""
    settings = parse_settings(FrontendSettings, "frontend", sys.argv[1:] if argv is None else argv)
    setup_logging("frontend", settings.log_level, settings.log_format)
    die_with_parent()
    try:
        keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file else None
    except (OSError, ValueError) as error:
        logging.getLogger("frontend_svc").critical("--api-keys-file: %s", error)
        return 2
    try:
        return asyncio.run(serve(settings, keys))
    except OSError as error:
        logging.getLogger("frontend_svc").critical("%s", error)
        return 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
