"""Tables on the terminal, CSV and JSON in a folder, and the bars."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """What must be reached: the worst case found, and whether it reaches."""

    what: str
    worst: str
    is_met: bool | None
    """None: it was not measured."""

    def __str__(self) -> str:
        state = "NOT MEASURED" if self.is_met is None else "met" if self.is_met else "NOT MET"
        return f"{state:12} {self.what}: {self.worst}"


def text_of(value: object) -> str:
    """A cell."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row]) -> str:
    """Aligned columns under their names."""
    if not rows:
        return "(nothing)"
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([text_of(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def plain(value: Any) -> Any:
    """The same for JSON, which has no word for infinities and for what is no number: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def write(
    folder: Path, machine: Row, sections: dict[str, list[Row]], bars: Sequence[Bar], notes: Sequence[str]
) -> None:
    """gpu_check.json, and a CSV per section."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine, "sections": sections, "bars": [asdict(bar) for bar in bars], "notes": list(notes)}
    (folder / "gpu_check.json").write_text(json.dumps(plain(found), indent=1, allow_nan=False) + "\n")
    for name, rows in sections.items():
        if rows:
            names = list(dict.fromkeys(column for row in rows for column in row))
            with (folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, names, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
