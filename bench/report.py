"""BENCHMARKS.md from the recorded figures: the bars first, then a table per section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.bars import BARS, Bar
from bench.record import Figure, number, spread

MARKS = ("<!-- bench: begin -->", "<!-- bench: end -->")
TITLES = {
    "single": "One stream",
    "steps": "Decode steps",
    "batch": "Offline batch",
    "shared": "Shared prefix",
    "clients": "Streaming clients",
    "wire": "What three processes cost one stream",
    "memory": "Memory",
    "cold": "Cold start",
    "scheduler": "Scheduler",
    "tracing": "Traces",
    "frontend": "Frontend",
    "perplexity": "Perplexity by weights",
}


def bar_row(bar: Bar, figures: dict[str, Figure]) -> list[str]:
    """What the bar is about, its target, the figure and whether it is met."""
    figure = figures.get(bar.key)
    if figure is None:
        return [bar.what, bar.target, "not measured", "", ""]
    if figure.has_failed:
        return [bar.what, bar.target, "failed", spread(figure), "no"]
    met = "yes" if bar.is_met(figure.median) else "no"
    return [bar.what, bar.target, number(figure.median), spread(figure), met]


def bars_table(figures: Iterable[Figure]) -> list[list[str]]:
    by_key = {figure.key: figure for figure in figures}
    return [bar_row(bar, by_key) for bar in BARS]


def print_bars(figures: Iterable[Figure]) -> None:
    """To the terminal."""
    print(f"\n{'bar':<66} {'target':>8} {'median':>12}  met  range")
    for what, target, median, span, met in bars_table(figures):
        print(f"{what:<66} {target:>8} {median:>12}  {met:<4} {span}")


def markdown(figures: Sequence[Figure]) -> str:
    """All tables, each with the date, machine and command of its figures."""
    parts = ["### Bars", table(["bar", "target", "median", "range", "met"], bars_table(figures))]
    for section, title in TITLES.items():
        found = [figure for figure in figures if figure.section == section]
        if not found:
            continue
        rows = [
            [figure.name, "failed" if figure.has_failed else number(figure.median), figure.unit, spread(figure)]
            for figure in found
        ]
        parts += [f"### {title}", table(["figure", "median", "unit", "range"], rows)]
        origins = dict.fromkeys((figure.date, figure.machine, figure.command) for figure in found)
        parts += [f"{date}, {machine}: `{command}`" for date, machine, command in origins]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numeric = {"median", "range", "target"}
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---:" if x in numeric else "---" for x in head) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def replace_marked(path: Path, text: str) -> None:
    """Puts the text between the file's marks. Raises ValueError where it has none."""
    before, begin, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"{path} has no {' and '.join(MARKS)}")
    path.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")
