"""Reads values.yaml together with its comments: path, default and explanation of every value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "chart"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart."""

    path: str
    """Dotted, such as model.cache.size."""
    default: Any
    comment: str
    """The comment above it as one line; empty where there is none."""


def read_values(text: str) -> list[Value]:
    """All values in their order. A mapping with a comment right above it is one value, one without is a section."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    return list(_walk(root, text.splitlines(), ""))


def chart_values() -> list[Value]:
    """Those of the chart."""
    return read_values((CHART / "values.yaml").read_text())


def _walk(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        path = prefix + key.value
        comment = _comment_above(lines, key.start_mark.line, key.start_mark.column)
        if isinstance(child, yaml.MappingNode) and child.value and not comment:
            yield from _walk(child, lines, f"{path}.")
        else:
            yield Value(path, _construct(child), comment)


def _construct(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _comment_above(lines: list[str], line: int, column: int) -> str:
    found: list[str] = []
    start = " " * column + "#"
    while line > 0 and lines[line - 1].startswith(start):
        line -= 1
        found.insert(0, lines[line].strip().lstrip("#").strip())
    return " ".join(found)


def shown(default: Any) -> str:
    """A default as it stands in a table."""
    return json.dumps(default, ensure_ascii=False)
