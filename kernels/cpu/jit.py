"""Compiles kernels with numba, and keeps what was compiled for the next start.

A kernel takes addresses and sizes (int64) and float64 scalars, never arrays: a call costs about a microsecond. It
splits its work into chunks that a team of threads takes (team.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "PAGEWIRE_KERNEL_CACHE"
F = TypeVar("F", bound=Callable[..., Any])


_warned: set[str] = set()


def warn_once(problem: str) -> None:
    """Says loudly, once, that torch does what compiled kernels should."""
    if problem not in _warned:
        _warned.add(problem)
        logger.warning("the CPU kernels can't be used: %s; torch does their work, several times slower", problem)


def unavailable() -> str | None:
    """Why nothing can be compiled here, as a sentence for the log; None if it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'pagewire[worker]')"
    return None


def inlined(function: F) -> F:
    """A kernel, or a part of one that is compiled into each caller; compiles at the first call.

    Sums may be fused (a * b + c), never reordered.
    """
    import numba

    _prepare(numba)
    # nnan, ninf or reassoc would change what a row gives with its neighbours; contraction does not.
    compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})(function)
    return compiled


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Within it the kernels for `what` are called for the first time; says what that is when it takes long.

    One process compiles at a time: the others then read what it has compiled.
    """
    marker = cache_dir() / ("-".join(re.findall(r"\w+", what)) + ".done")
    with open(cache_dir() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not marker.exists()
        if is_first:
            logger.info("compiling the CPU kernels for %s, once per version of them: about a minute", what)
        started = time.monotonic()
        yield
        marker.touch()
    where = f"compiled; kept in {cache_dir()}" if is_first else "read from the cache"
    logger.info("CPU kernels for %s: %s, %.1f s", what, where, time.monotonic() - started)


class Chunks:
    """A kernel's work: a function of (address of its arguments, chunk), to be called by address (see team.py)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """Of the compiled function; compiles at the first call."""
        if self._compiled is None:
            import numba

            _prepare(numba)
            self._compiled = numba.cfunc("void(int64, int64)", cache=True, error_model="numpy", fastmath={"contract"})(
                self._function
            )
        address: int = self._compiled.address
        return address


def chunks(function: Callable[..., Any]) -> Chunks:
    """A kernel's work, shared out by chunks."""
    return Chunks(function)


def _prepare(numba: Any) -> None:
    """Sets numba's cache, before the first kernel."""
    numba.config.CACHE_DIR = str(cache_dir())


_cache_dir: Path | None = None


def cache_dir() -> Path:
    """Where compiled kernels lie: a folder per state of these sources, because numba looks at one file's age only.

    $PAGEWIRE_KERNEL_CACHE, or pagewire/kernels in the user's cache folder; a temporary folder where that can't be
    written.
    """
    global _cache_dir
    if _cache_dir is not None:
        return _cache_dir
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "kernels"
    wanted = Path(os.environ.get(CACHE_VARIABLE) or default) / digest.hexdigest()[:16]
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError as error:
        fallback = Path(tempfile.gettempdir()) / f"pagewire-kernels-{os.getuid()}" / digest.hexdigest()[:16]
        logger.warning("compiled kernels can't be kept in %s (%s); using %s", wanted, error, fallback)
        fallback.mkdir(parents=True, exist_ok=True)
        wanted = fallback
    _cache_dir = wanted
    return wanted
