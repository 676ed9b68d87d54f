"""Compiles kernels with numba, and keeps what was compiled for the next start.

A kernel takes addresses and sizes (int64) and float64 scalars, never arrays: a call costs about a microsecond. It
splits its work into chunks that a team of threads takes (team.py).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import types
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
    name_by_content(function)
    # nnan, ninf or reassoc would change what a row gives with its neighbours; contraction does not.
    compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})(function)
    return compiled


def name_by_content(function: Callable[..., Any]) -> None:
    """Gives a function that another one made a name of its own, by what it closes over.

    A symbol in the compiled code is made of the name, the types and a number that counts within the process that
    compiles. Code that several processes have compiled and kept may therefore have the same symbol for two functions
    that one factory made, and whoever loads both gets the first of them twice.
    """
    if function.__closure__ and "@" not in function.__qualname__:
        digest = hashlib.sha256(_content(function).encode()).hexdigest()[:12]
        function.__qualname__ += f"@{digest}"


def _content(value: Any) -> str:
    """A text that is the same in every process and differs where what is compiled does."""
    value = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value  # numba's wrappers
    if isinstance(value, Chunks):
        value = value._function
    if isinstance(value, types.FunctionType):
        cells = [_content(cell.cell_contents) for cell in value.__closure__ or ()]
        return f"{value.__module__}.{value.__qualname__}({', '.join(cells)})"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_content, value))}]"
    text = repr(value)
    if " at 0x" not in text:
        return text
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    attributes = ", ".join(f"{name}: {_content(x)}" for name, x in sorted(vars(value).items()))
    return f"{type(value).__module__}.{type(value).__qualname__}({attributes})"


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Within it the kernels for `what` are called for the first time; says what that is when it takes long.

    One process compiles at a time: the others then read what it has compiled.
    """
    marker = cache_dir() / ("-".join(re.findall(r"\w+", what)) + ".done")
    with open(cache_dir() / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process compiles CPU kernels: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not marker.exists()
        if is_first:
            # A warning: the one line that `LLM` shows where no logging is set up, and a minute of silence is long.
            logger.warning("compiling the CPU kernels for %s, once per version of them: about a minute", what)
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
            name_by_content(self._function)
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
    _lock_cache_files()


_preparing = threading.Lock()


def _lock_cache_files() -> None:
    """Lets one process at a time read or write what is kept.

    numba takes the next free number for a file without asking: two processes that compile a kernel for different types
    at the same time would take the same one, and each would later run the other's code under its own types.
    """
    from numba.core.caching import IndexDataCacheFile

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            if Path(self._cache_path).is_relative_to(cache_dir()):
                with open(cache_dir() / "files.lock", "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    return method(self, *args)
            return method(self, *args)

        return call

    with _preparing:
        for name in ("save", "load"):
            method = getattr(IndexDataCacheFile, name)
            if not hasattr(method, "__wrapped__"):
                setattr(IndexDataCacheFile, name, locked(method))


_cache_dir: Path | None = None


def cache_dir() -> Path:
    """Where compiled kernels lie: a folder per state of the sources of `kernels`, because numba looks at one file's age
    only, and a kernel holds constants and parts of others.

    $PAGEWIRE_KERNEL_CACHE, or pagewire/kernels in the user's cache folder; a temporary folder of this process where
    that can't be written, or belongs to another user: what lies there is run.
    """
    global _cache_dir
    if _cache_dir is None:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "kernels"
        wanted = Path(os.environ.get(CACHE_VARIABLE) or default) / _sources_digest(Path(__file__).parent.parent)
        if problem := _unusable(wanted):
            _cache_dir = Path(tempfile.mkdtemp(prefix="pagewire-kernels-"))
            atexit.register(shutil.rmtree, _cache_dir, ignore_errors=True)
            logger.warning("compiled kernels can't be kept in %s (%s); each start compiles them anew", wanted, problem)
        else:
            _cache_dir = wanted
    return _cache_dir


def _sources_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _unusable(folder: Path) -> str:
    """Makes the folder; why kernels can't be kept in it, or nothing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        status = folder.stat()
    except OSError as error:
        return str(error)
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        return "others may write to it"
    return ""
