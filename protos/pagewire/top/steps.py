"""The last steps of a core, as pictures and as rows."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from pagewire.stats import CoreDetail
from pagewire.top.format import (
    Glyphs,
    count,
    duration,
    milliseconds,
    sparkline,
    stage_bar,
)
from pagewire.top.table import Column, rule, table


@dataclass(frozen=True, slots=True)
class _Step:
    """One row of StepColumns."""

    number: int
    age_us: int
    num_requests: int
    num_tokens: int
    num_prefill: int
    stages_us: tuple[int, int, int, int]
    worker_us: tuple[int, int, int]
    is_failed: bool
    bar: str


def _stage(title: str, width: int, idx: int) -> Column[_Step]:
    return Column[_Step](title, width, lambda s: milliseconds(s.stages_us[idx]))


def _worker_stage(title: str, width: int, idx: int, rank: int) -> Column[_Step]:
    return Column[_Step](title, width, lambda s: milliseconds(s.worker_us[idx]), rank=rank)


_STEPS = [
    Column[_Step]("STEP", 8, lambda s: str(s.number), style=lambda s: "red" if s.is_failed else ""),
    Column[_Step]("AGE", 5, lambda s: "failed" if s.is_failed else duration(s.age_us / 1000)),
    Column[_Step]("BATCH", 5, lambda s: count(s.num_requests)),
    Column[_Step]("TOKENS", 6, lambda s: count(s.num_tokens), style=lambda s: "bold"),
    Column[_Step]("PREFILL", 7, lambda s: count(s.num_prefill)),
    Column[_Step]("DECODE", 6, lambda s: count(s.num_tokens - s.num_prefill)),
    _stage("SCHED", 5, 0),
    _stage("EXECUTE", 7, 1),
    _stage("UPDATE", 6, 2),
    _stage("PUBLISH", 7, 3),
    _worker_stage("FORWARD", 7, 1, 0),
    _worker_stage("PREPARE", 7, 0, 2),
    _worker_stage("SAMPLE", 6, 2, 1),
    Column[_Step](" ms by stage", 20, lambda s: " " + s.bar, is_left=True, style=lambda s: "cyan", rank=3),
]
BAR_WIDTH = 18
PICTURE_MARGIN = 22
"""What a picture's name and scale take of its line."""


def steps(detail: CoreDetail, num_rows: int | None, width: int, glyphs: Glyphs) -> list[Text]:
    """The last steps: two lines of pictures over all that are known, then the newest ones as rows."""
    columns = detail.steps
    stages = [columns.schedule_us, columns.execute_us, columns.update_us, columns.publish_us]
    totals = [sum(times) for times in zip(*(stage.tolist() for stage in stages), strict=True)]
    tokens = columns.num_scheduled_tokens.tolist()
    running = f" one runs for {duration(detail.step_age_ms)}," if detail.step_age_ms > 1000 else ""
    legend = f" newest first, in ms; pictures: the last {len(totals)}, oldest left" if totals else " none yet"
    lines = [rule("steps", width, glyphs, (running, "yellow"), (legend, "dim"))]
    for name, values, shown in (
        ("tokens", tokens, count(max(tokens, default=0))),
        ("time", totals, milliseconds(max(totals, default=0)) + " ms"),
    ):
        line = Text(f"{name:<6} ", style="bold", no_wrap=True)
        line.append(sparkline(values[-(width - PICTURE_MARGIN) :], glyphs), style="not bold cyan")
        lines.append(line.append(f" up to {shown}", style="not bold") if totals else line)
    longest = max(totals[-(num_rows or len(totals)) :], default=0)
    rows = [
        _Step(
            int(columns.numbers[i]),
            int(columns.ages_us[i]),
            int(columns.num_requests[i]),
            tokens[i],
            int(columns.num_prefill_tokens[i]),
            (int(stages[0][i]), int(stages[1][i]), int(stages[2][i]), int(stages[3][i])),
            (int(columns.prepare_us[i]), int(columns.forward_us[i]), int(columns.sample_us[i])),
            bool(columns.is_failed[i]),
            stage_bar([int(stage[i]) for stage in stages], longest, BAR_WIDTH, glyphs),
        )
        for i in reversed(range(len(totals)))
    ]
    return lines + table(_STEPS, rows[:num_rows], width, glyphs)
