"""Sizes of files and functions, and what no file of the repo may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("protos", "frontend_svc", "core_svc", "worker_svc", "kernels")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ENGINE_STEP_LINES = 20


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def source_files() -> list[Path]:
    found = [
        path
        for root in SOURCES
        for path in sorted((ROOT / root).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]
    assert len(found) > 50
    return found


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and number of lines of every function, without its docstring."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            if ast.get_docstring(node) is not None and len(node.body) > 1:
                first = node.body[1]
            found.append((node.name, (node.end_lineno or 0) - first.lineno + 1))
    return found


def test_files_stay_short():
    long = {
        str(p.relative_to(ROOT)): n for p in source_files() if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"more than {MAX_FILE_LINES} lines: {long}"


def test_functions_stay_short():
    long = [
        f"{path.relative_to(ROOT)}:{name} {lines}"
        for path in source_files()
        for name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    ]
    assert not long, f"more than {MAX_FUNCTION_LINES} lines: {long}"


def test_the_engine_step_can_be_read_at_a_glance():
    (step,) = [lines for name, lines in functions(ROOT / "core_svc" / "engine.py") if name == "step"]
    assert step <= MAX_ENGINE_STEP_LINES


def test_every_module_says_what_it_is():
    """A docstring at the top of every module; one whose first line needs " and " twice is two files."""
    for path in source_files():
        assert ast.get_docstring(ast.parse(path.read_text())), path


# Assembled, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of one machine": re.compile("|".join(["/ho" + r"me/\w", "/ro" + "ot/", "/wo" + "rk/", "/tmp/pr" + "ep"])),
    "a merge conflict": re.compile(r"^(<{7}|>{7}) ", re.MULTILINE),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in FORBIDDEN[what].finditer(text)]
    assert not found, f"{what}: {found}"


def test_no_lock_file_names_a_registry():
    """Where packages come from is the machine's matter."""
    for path in tracked_files():
        if path.name == "package-lock.json":
            assert '"resolved"' not in path.read_text(), path
