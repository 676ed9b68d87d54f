"""`python -m worker_svc`: one worker process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from pagewire.errors import PagewireError
from pagewire.runtime.lifetime import SUPERVISOR_VARIABLE, die_with_parent, end_on_signals
from pagewire.runtime.logs import setup_logging
from pagewire.runtime.settings import parse_settings
from worker_svc.openmp import bound_spinning
from worker_svc.settings import WorkerSettings

logger = logging.getLogger("worker_svc")
COMPUTE_JOIN_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker; returns the exit status."""
    settings = parse_settings(WorkerSettings, "worker", sys.argv[1:] if argv is None else argv)
    setup_logging("worker", settings.log_level, settings.log_format)
    if settings.die_with_parent:
        os.environ.setdefault(SUPERVISOR_VARIABLE, str(os.getppid()))
    die_with_parent()
    bound_spinning()
    # Only now: torch takes seconds to import, and --help or a bad flag should not.
    from worker_svc.compute import ComputeThread, take_short_turns
    from worker_svc.process import serve

    take_short_turns()
    compute = ComputeThread()
    try:
        status = asyncio.run(serve(settings, compute))
    except PagewireError as error:
        logger.error("the worker ends: %s", error.message)
        status = 1
    except OSError as error:
        logger.error("the worker ends: %s", error)
        status = 1
    if not compute.close(COMPUTE_JOIN_S):
        # A computation hangs or a load still runs; interpreter shutdown under it could crash or wait.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
