"""The one line that a process prints on stdout once it can be used; supervisors and tests read it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pagewire.runtime.transport import format_address

_LINE = re.compile(r"pagewire (?P<service>\w+) ready on (?P<host>\S+):(?P<port>\d+) incarnation=(?P<incarnation>\w+)")


@dataclass(frozen=True, slots=True)
class Ready:
    """A process that can be used."""

    service: str
    host: str
    port: int
    incarnation: str

    @property
    def address(self) -> str:
        return format_address(self.host, self.port)


def print_ready(service: str, host: str, port: int, incarnation: str) -> None:
    """Prints the line."""
    print(f"pagewire {service} ready on {format_address(host, port)} incarnation={incarnation}", flush=True)


def parse_ready(line: str) -> Ready | None:
    """Reads the line; None where it is another one."""
    match = _LINE.fullmatch(line.strip())
    if match is None:
        return None
    return Ready(match["service"], match["host"].strip("[]"), int(match["port"]), match["incarnation"])
