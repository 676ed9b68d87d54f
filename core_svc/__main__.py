"""`python -m core_svc`: one core process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from core_svc.settings import CoreSettings
from core_svc.startup import CoreProcess, explain
from pagewire.errors import PagewireError
from pagewire.runtime.lifetime import die_with_parent, end_on_signals
from pagewire.runtime.logs import setup_logging
from pagewire.runtime.ready import print_ready
from pagewire.runtime.server import wait_for_signal
from pagewire.runtime.settings import parse_settings

logger = logging.getLogger("core_svc")


async def serve(settings: CoreSettings) -> int:
    """Serves until a signal (exit status 0) or a failure that lasts (1)."""
    core = CoreProcess(settings)
    signalled = asyncio.ensure_future(wait_for_signal())
    await core.start()
    connected = asyncio.ensure_future(core.connect())
    await _first(signalled, connected, core.failed)
    if connected.done() and connected.exception() is None:
        print_ready("core", core.host, core.port, core.incarnation)
        await _first(signalled, core.failed)
    failed = next((f for f in (core.failed, connected) if f.done() and f.exception() is not None), None)
    if failed is not None and not signalled.done():
        logger.error("the core ends: %s", explain(failed.exception() or RuntimeError("unknown")))
        await core.stop(0.0)
        return 1
    logger.info("signal received: draining for up to %g s", settings.drain_s)
    await _first(asyncio.ensure_future(core.lame_duck()), core.failed)
    await core.stop(settings.drain_s)
    connected.cancel()
    # What a start-up that was cut short failed with is no news.
    await asyncio.gather(connected, return_exceptions=True)
    return 0


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a core; returns the exit status."""
    settings = parse_settings(CoreSettings, "core", sys.argv[1:] if argv is None else argv)
    setup_logging("core", settings.log_level, settings.log_format)
    die_with_parent()
    try:
        settings.engine_config()
        return asyncio.run(serve(settings))
    except (PagewireError, OSError) as error:
        logger.error("the core ends: %s", explain(error))
        return 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
