"""Numbers, times and pictures of `pagewire top` as short texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.stats import BlockState


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What pictures are made of."""

    levels: str
    """From nothing to all, for lines of values."""
    blocks: dict[BlockState, str]
    stages: str
    """Schedule, execute, update, publish, for bars."""
    rule: str
    ellipsis: str


UNICODE = Glyphs(
    levels=" ▁▂▃▄▅▆▇█",
    blocks={BlockState.FREE: "·", BlockState.CACHED: "░", BlockState.USED: "▓", BlockState.SHARED: "█"},
    stages="▒█▓░",
    rule="─",
    ellipsis="…",
)
ASCII = Glyphs(
    levels=" .:-=+*#@",
    blocks={BlockState.FREE: ".", BlockState.CACHED: "-", BlockState.USED: "+", BlockState.SHARED: "#"},
    stages="sEup",
    rule="-",
    ellipsis="~",
)

MANY = 10_000_000
NOTHING = "-"
FREE_CELL = 2 / 3
"""A cell of the map is shown as free where more of its blocks are."""


def count(value: float) -> str:
    """A whole number, to the last digit below ten millions."""
    if abs(value) < MANY:
        return f"{value:.0f}"
    return next(f"{value / unit:.4g}{name}" for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= unit)


def rate(value: float | None) -> str:
    """Something per second."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if value < 100_000 else count(value)


def share(value: float | None) -> str:
    """A part of a whole."""
    return NOTHING if value is None else f"{value:.1%}"


def duration(ms: float) -> str:
    """Such as 85ms, 1.4s, 42s, 3m05, 7h22, 3d04."""
    seconds = ms / 1000
    if ms < 1000:
        return f"{ms:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    for unit, part, names in ((60, 1, "m"), (3600, 60, "h"), (86400, 3600, "d")):
        if seconds < unit * (60 if unit < 3600 else 24 if unit < 86400 else 1000):
            return f"{int(seconds // unit)}{names}{int(seconds % unit // part):02d}"
    return f"{seconds / 86400:.0f}d"


def milliseconds(us: float) -> str:
    """Microseconds as milliseconds with three digits."""
    ms = us / 1000
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def size(num_bytes: int) -> str:
    """Memory, in powers of 1024."""
    if not num_bytes:
        return NOTHING
    return f"{num_bytes / 2**30:.1f}G" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f}M"


def shortened(text: str, width: int, glyphs: Glyphs) -> str:
    """The text, without its middle where it is too long: names begin alike and differ at the end."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return text[:head] + glyphs.ellipsis + text[len(text) - (width - 1 - head) :] if width > 1 else text[:width]


def sparkline(values: Sequence[float], glyphs: Glyphs) -> str:
    """A character per value; the largest is full, and what is not nothing is seen."""
    top = max(values, default=0)
    steps = len(glyphs.levels) - 1
    return "".join(glyphs.levels[max(1, round(v / top * steps)) if v > 0 else 0] for v in values)


def stage_bar(times: Sequence[float], longest: float, width: int, glyphs: Glyphs) -> str:
    """The stages of a step as one bar; a step that takes as long as the longest fills the width."""
    if longest <= 0:
        return ""
    found, before, total = "", 0, 0.0
    for time, glyph in zip(times, glyphs.stages, strict=True):
        total += time
        end = round(total / longest * width)
        found += glyph * (end - before)
        before = end
    return found


def block_map(states: bytes, num_cells: int) -> list[BlockState]:
    """The pool in at most so many cells; each shows what most of its blocks are that are not free, if enough are."""
    num_cells = min(num_cells, len(states))
    cells = []
    for cell in range(num_cells):
        part = states[cell * len(states) // num_cells : (cell + 1) * len(states) // num_cells]
        found = Counter(part)
        num_free = found.pop(BlockState.FREE, 0)
        if num_free > len(part) * FREE_CELL or not found:
            cells.append(BlockState.FREE)
        else:
            cells.append(BlockState(max(found, key=lambda state: (found[state], state))))
    return cells
