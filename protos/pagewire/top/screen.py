"""The whole screen of `pagewire top`: its parts one below the other, as much of each as there is room for."""

from __future__ import annotations

import time

from rich.text import Text

from pagewire.stats import CoreConnection
from pagewire.top.blocks import kv_map
from pagewire.top.data import Sample, rates_between
from pagewire.top.format import Glyphs
from pagewire.top.rates import rates
from pagewire.top.requests import requests
from pagewire.top.services import num_other_lines, services
from pagewire.top.steps import steps

NUM_FIXED_LINES = 15
"""Title, services, rates, rules, headers and pictures: all but the map's lines and the rows of steps and requests."""
MIN_STEPS, MAX_STEPS = 2, 16
PLAIN_STEPS, PLAIN_REQUESTS, PLAIN_MAP_LINES = 16, 50, 4
"""What output that is no screen gets."""


def screen(
    before: Sample | None, now: Sample, *, width: int, height: int | None, glyphs: Glyphs, note: str
) -> list[Text]:
    """The lines; at most `height` of them, where there is a height. `note` ends the title."""
    detail = now.detail
    num_map_lines, num_steps, num_requests = _shares(None if height is None else height - num_other_lines(now))
    lines = [
        _title(now, width, note),
        *services(before, now, width, glyphs),
        *rates(now, rates_between(before, now), width, glyphs),
        *kv_map(detail, num_map_lines, width, glyphs),
        *steps(detail, num_steps, width, glyphs),
        *requests(detail, num_requests, width, glyphs),
    ]
    for line in lines:
        line.truncate(width)
    return lines[:height]


def _shares(height: int | None) -> tuple[int, int, int]:
    """Lines of the map, rows of steps, rows of requests."""
    if height is None:
        return PLAIN_MAP_LINES, PLAIN_STEPS, PLAIN_REQUESTS
    num_map_lines = 1 if height < 30 else 2 if height < 40 else 4
    spare = max(height - NUM_FIXED_LINES - num_map_lines, 0)
    num_steps = min(max(spare // 3, MIN_STEPS), MAX_STEPS)
    return num_map_lines, num_steps, max(spare - num_steps, 0)


def _title(now: Sample, width: int, note: str) -> Text:
    title = Text("pagewire top", style="bold reverse", no_wrap=True)
    model = now.detail.model or next((c.model for c in _cores(now) if c.model), "")
    moment = time.strftime("%H:%M:%S", time.localtime(now.wall_s))
    title.append(f"  {model}  {moment}", style="not reverse")
    room = width - title.cell_len - len(note)
    if note and room >= 2:
        title.append(" " * room + note, style="not bold not reverse dim")
    return title


def _cores(now: Sample) -> tuple[CoreConnection, ...]:
    return now.frontend.stats.cores if now.frontend.stats is not None else ()
