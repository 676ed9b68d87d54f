"""Tables of a fixed width for `pagewire top`: columns that fit are shown, those of least use are left out first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from pagewire.runtime.log_format import escape_control
from pagewire.top.format import Glyphs, shortened

T = TypeVar("T")
HEADER_STYLE = "bold"


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column: `text` makes a cell of a row, `style` colours it. Colours tell nothing that the texts don't."""

    title: str
    width: int
    text: Callable[[T], str]
    is_left: bool = False
    keeps_end: bool = False
    """Where a left-aligned cell is too long, its middle is left out and not its end."""
    style: Callable[[T], str] = lambda row: ""
    rank: int = 0
    """Columns of a higher rank are left out first."""
    max_width: int = 0
    """Takes what is left of the width, up to so much."""


def fit(columns: Sequence[Column[T]], width: int) -> list[tuple[Column[T], int]]:
    """The columns that a width has room for, with their widths."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) - 1 > width:
        worst = max(column.rank for column in kept)
        kept.remove(next(column for column in reversed(kept) if column.rank == worst))
    spare = width - (sum(column.width + 1 for column in kept) - 1)
    widths = []
    for column in kept:
        more = min(max(spare, 0), max(column.max_width - column.width, 0))
        spare -= more
        widths.append(column.width + more)
    return list(zip(kept, widths, strict=True))


def table(columns: Sequence[Column[T]], rows: Sequence[T], width: int, glyphs: Glyphs) -> list[Text]:
    """Header and rows as lines."""
    kept = fit(columns, width)
    lines = [_line([(c.title.ljust(w) if c.is_left else c.title.rjust(w), HEADER_STYLE) for c, w in kept])]
    for row in rows:
        lines.append(_line([(_cell(column, row, w, glyphs), column.style(row)) for column, w in kept]))
    return lines


def _cell(column: Column[T], row: T, width: int, glyphs: Glyphs) -> str:
    """A text that is too long is cut. A number is not: half of it would be another one."""
    text = escape_control(column.text(row))
    if not column.is_left:
        return text.rjust(width)
    text = shortened(text, width, glyphs) if column.keeps_end else text[:width]
    return text.ljust(width)


def _line(cells: Sequence[tuple[str, str]]) -> Text:
    line = Text(no_wrap=True)
    for idx, (text, style) in enumerate(cells):
        line.append(" " if idx else "")
        line.append(text, style=style or None)
    line.rstrip()
    return line


def rule(title: str, width: int, glyphs: Glyphs, *parts: tuple[str, str]) -> Text:
    """A line with a title in it, and further parts with their styles."""
    line = Text(glyphs.rule * 2 + " ", style="dim", no_wrap=True)
    line.append(title, style="bold not dim")
    for text, style in parts:
        line.append(text, style=f"not dim {style}")
    line.append(" " + glyphs.rule * max(width - line.cell_len - 1, 0))
    return line
