"""The ratios of the bars as one picture: how many times faster than a peer, with a mark at the bar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.bars import BARS, Bar
from bench.record import Figure

MET, MISSED, MARK, TEXT = "#2a7f62", "#c0672b", "#1d2b3a", "#26323d"
ROW_INCHES = 0.42


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Writes the picture; nothing where no ratio to a peer has been measured. The suffix chooses the format."""
    by_key = {figure.key: figure for figure in figures}
    rows = [(bar, by_key[bar.key]) for bar in BARS if _is_shown(bar, by_key)]
    if not rows:
        return
    rows.reverse()
    figure, axes = pyplot.subplots(figsize=(9.5, 1.3 + ROW_INCHES * len(rows)), layout="constrained")
    for place, (bar, found) in enumerate(rows):
        color = MET if bar.is_met(found.median) else MISSED
        axes.barh(place, found.median, height=0.62, color=color)
        axes.plot([found.low, found.high], [place, place], color=TEXT, linewidth=1)
        axes.plot([bar.limit, bar.limit], [place - 0.42, place + 0.42], color=MARK, linewidth=2.4)
        axes.text(
            max(found.high, bar.limit) + 0.06, place, f"{found.median:.2f} ×", va="center", color=TEXT, fontsize=9
        )
    axes.axvline(1, color=TEXT, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [bar.what for bar, _ in rows], fontsize=9)
    axes.set_xlim(0, 1.14 * max(max(found.high, bar.limit) for bar, found in rows))
    axes.set_xlabel(
        "Pagewire / the other; upright mark: the bar (green: met); thin line: range over the passes", fontsize=9
    )
    title = "Pagewire against its peers, same machine, same run (higher is better)"
    axes.set_title(title, fontsize=11, loc="left", color=TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    # Without dates and random ids the file changes only where a figure does.
    with matplotlib.rc_context({"svg.hashsalt": "pagewire", "svg.fonttype": "none"}):
        pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _is_shown(bar: Bar, figures: dict[str, Figure]) -> bool:
    if bar.key.startswith("tracing/"):
        # Ours against ours.
        return False
    return bar.is_at_least and bar.key in figures and not figures[bar.key].has_failed
