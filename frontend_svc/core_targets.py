"""Where the cores are: a list of addresses, and names in DNS whose addresses are looked up again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

DNS_PREFIX = "dns:///"
RESOLVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """One core."""

    address: str
    """host:port."""
    server_name: str = ""
    """Whom its certificate has to name, where that is not the address's host."""


def split(entry: str) -> tuple[str, str, int]:
    """Prefix (`dns:///` or none), host and port of an entry. Raises ValueError with what is allowed."""
    prefix = DNS_PREFIX if entry.startswith(DNS_PREFIX) else ""
    host, colon, port = entry.removeprefix(DNS_PREFIX).rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or "/" in host:
        raise ValueError(f"--core has {entry!r}: must be HOST:PORT or {DNS_PREFIX}HOST:PORT, several with commas")
    return prefix, host, int(port)


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, sorted, as host:port. Raises OSError where there is none."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[set[tuple[int, str]]] = loop.create_future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            settle(answer.set_result, {(int(family), str(address[0])) for family, _, _, _, address in found})
        except (OSError, UnicodeError) as error:
            settle(answer.set_exception, OSError(str(error)))

    def settle(how: Callable[[Any], None], what: object) -> None:
        # The process may have gone on without an answer, or be over.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if answer.done() else how(what))

    # Not on the loop's own threads, for which the process would wait at its end: an answer may take very long.
    threading.Thread(target=look_up, name="look-up", daemon=True).start()
    addresses = await answer
    return sorted(f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, ip in addresses)


async def follow(entries: Sequence[str], keep: Callable[[Mapping[str, Target]], None]) -> None:
    """Tells `keep` which cores there are, by address, now and whenever the addresses of a name change.

    Returns where no entry is a name to look up; else goes on until cancelled. A name that can't be looked up keeps the
    addresses that it had.
    """
    known: dict[str, dict[str, Target]] = {}
    while True:
        for entry in entries:
            prefix, host, port = split(entry)
            if not prefix:
                known[entry] = {entry: Target(entry)}
                continue
            try:
                addresses = await resolve(host, port)
            except OSError as error:
                if known.get(entry) is None:
                    log.warning("%s cannot be looked up: %s; trying again", host, error)
                    known[entry] = {}
                continue
            if list(known.get(entry, ())) != addresses:
                log.info("%s is %s", host, ", ".join(addresses))
            known[entry] = {address: Target(address, host) for address in addresses}
        keep({name: target for targets in known.values() for name, target in targets.items()})
        if all(not split(entry)[0] for entry in entries):
            return
        await asyncio.sleep(RESOLVE_EVERY_S)
