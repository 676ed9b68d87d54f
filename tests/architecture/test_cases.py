"""Every known fault that finished work touches has a test that names it (`Case: vllm#29987` in its docstring)."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "cases.toml").read_text())["cases"]
_LINE = re.compile(r"^\s*Case:\s*(.+?)\s*$", re.MULTILINE)
NUM_ROWS = 49
DONE = ("spine", "tracing")
"""Finished pieces of work: their rows have tests."""


def named_cases() -> dict[str, list[str]]:
    """Report -> tests that name it. Docstrings of modules, classes and functions under tests/ are read."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for match in _LINE.finditer(ast.get_docstring(node) or ""):
                name = f"{path.relative_to(TESTS)}::{getattr(node, 'name', '')}"
                for report in match[1].split(","):
                    found.setdefault(report.strip().rstrip("."), []).append(name)
    return found


def test_the_table_is_whole():
    """Each row once, with a name; a row that waits says why."""
    assert len(CASES) == NUM_ROWS
    for report, row in CASES.items():
        assert row["name"], report
        assert row["issue"] in DONE or row["reason"], report


def test_every_row_of_finished_work_has_a_test():
    named = named_cases()
    missing = {
        report: row["name"]
        for report, row in CASES.items()
        if row["issue"] in DONE and not any(r in named for r in (report, *row.get("also", ())))
    }
    listing = "\n".join(f"  {report}: {name}" for report, name in missing.items())
    assert not missing, f"{len(missing)} rows have no test that names them:\n{listing}"


def test_tests_name_rows_that_exist():
    """A typo in a Case line would hide a missing test."""
    known = {report for first, row in CASES.items() for report in (first, *row.get("also", ()))}
    unknown = {report: tests for report, tests in named_cases().items() if report not in known}
    assert not unknown
