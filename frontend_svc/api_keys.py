"""API keys from a file: who may call, by name. Lines `name:key`; empty lines and those that begin with # don't count.

Several keys may have one name, so that a key can be replaced while both are good. A changed file is read again at the
next call (Kubernetes updates a mounted secret in place); one that can't be read or is wrong then changes nothing.
Neither keys nor lines of the file are ever part of a message.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from pathlib import Path

log = logging.getLogger(__name__)

MIN_KEY_CHARACTERS = 16
MAX_KEY_CHARACTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys of one file. Raises OSError or ValueError where it can't be used at the start."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = self._look()
        self._names = parse_keys(self._path.read_text(encoding="utf-8"), path)
        """By the key's SHA-256: keys themselves are not kept."""

    def name_of(self, key: str) -> str | None:
        """Whose key it is; None: nobody's. Takes as long whichever key it is, or none."""
        self._refresh()
        digest, found = _digest(key), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _look(self) -> _Stamp:
        status = os.stat(self._path)
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            names = parse_keys(self._path.read_text(encoding="utf-8"), str(self._path))
        except (OSError, ValueError) as error:
            if self._stamp != (0, 0, 0):
                log.error("the API keys stay as they were: %s", error)
            self._stamp = (0, 0, 0)
            return
        self._names, self._stamp = names, stamp
        log.info("%d API keys read from %s", len(names), self._path)


def parse_keys(text: str, path: str) -> dict[bytes, str]:
    """Names by the keys' SHA-256. Raises ValueError with the line's number and what is allowed."""
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, _, key = (part.strip() for part in line.partition(":"))
        place = f"{path}, line {number}"
        if not key:
            raise ValueError(f"{place}: must be name:key")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{place}: a name has 1 to 64 letters, digits and . _ @ -, beginning with a letter or digit"
            )
        if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS or not key.isascii() or " " in key:
            raise ValueError(
                f"{place}: the key of {name!r} must have {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} ASCII characters "
                "and no blank"
            )
        if found.setdefault(_digest(key), name) != name:
            raise ValueError(f"{place}: the key of {name!r} is another name's too")
    if not found:
        raise ValueError(f"{path} has no key: must have lines name:key")
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
