"""Writes the table of values into the chart's README; with --check it only compares."""

from __future__ import annotations

import sys

from chart_values import CHART, chart_values, shown

BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"


def table() -> str:
    """All values, one row each."""
    rows = ["| value | default | what it is |", "|---|---|---|"]
    for value in chart_values():
        cells = (f"`{value.path}`", f"`{shown(value.default)}`", value.comment)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """The README with the table between its marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    """Returns the exit status."""
    path = CHART / "README.md"
    old = path.read_text()
    new = with_table(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            print(f"{path} is not what values.yaml says: run python k8s/tools/make_readme.py", file=sys.stderr)
        return int(old != new)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
