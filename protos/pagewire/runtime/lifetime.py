"""A process's identity, and its tie to the supervisor that started it."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time

SUPERVISOR_VARIABLE = "PAGEWIRE_SUPERVISOR_PID"
"""Set by a supervisor for its children: they end when the process of this id does."""

_PR_SET_PDEATHSIG = 1
logger = logging.getLogger(__name__)


def new_incarnation() -> str:
    """A random id of this process's life: 128 bits, hexadecimal."""
    return secrets.token_hex(16)


def end_on_signals() -> None:
    """Has SIGTERM and SIGINT end this process at once, with 128 and their number, until it handles them itself.

    By default they do that too, but not to a container's first process, which would start and serve until it is killed.
    To be called early on the main thread.
    """
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, lambda number, frame: os._exit(128 + number))


def die_with_parent(kill_after_s: float = 10.0) -> None:
    """Ties this process to its supervisor: SIGTERM when that dies, SIGKILL `kill_after_s` seconds later.

    Does nothing in a process that no supervisor started (SUPERVISOR_VARIABLE is not set), or outside Linux. Call it
    early on the main thread. Children of this process are not tied: the variable is removed.
    """
    value = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if not value.isdigit() or not sys.platform.startswith("linux"):
        return
    supervisor = int(value)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        logger.warning("prctl failed (errno %d): this process may outlive its supervisor", ctypes.get_errno())
    if os.getppid() != supervisor:
        # It died before the line above.
        sys.exit("the supervisor is gone")
    threading.Thread(target=_kill_later, args=(supervisor, kill_after_s), name="die-with-parent", daemon=True).start()


def _kill_later(supervisor: int, kill_after_s: float) -> None:
    """Blocks until the supervisor is gone, then makes sure that this process goes too, drained or not."""
    try:
        descriptor = os.pidfd_open(supervisor)
    except ProcessLookupError:
        pass
    except OSError:
        # No pidfd on this kernel: the signal above is all there is.
        return
    else:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not poller.poll():
            pass
        os.close(descriptor)
    time.sleep(kill_after_s)
    os.kill(os.getpid(), signal.SIGKILL)
