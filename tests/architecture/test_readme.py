"""The README's annotated tree is the tree that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "frontend_svc",
    "core_svc",
    "worker_svc",
    "worker_svc/models",
    "kernels",
    "kernels/cpu",
    "kernels/cuda",
    "bench",
    "bench/gpu_check",
    "bench/peers",
    "tests",
)
TESTS = sorted(f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.glob("*.py")))
# Named as folders, or not worth a line of their own.
NOT_NAMED = {"__init__.py", "py.typed"}
_NAME = re.compile(r"^[│├└─\s]*(?P<name>[\w.\-/]+)")


def tree_paths(text: str) -> list[str]:
    """The paths of the fenced block that begins with `pagewire/`, relative to the repo.

    A line is (indented by spaces or box characters) a name, a trailing slash for a folder, then its annotation. Four
    columns of indent are one level.
    """
    block = re.search(r"^```[a-z]*\n(pagewire/.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None, "README has no fenced tree that begins with pagewire/"
    paths: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in block[1].splitlines()[1:]:
        match = _NAME.match(line)
        if match is None or not match["name"].strip("./"):
            continue
        indent, name = match.start("name"), match["name"]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        path = "/".join([*(parent for _, parent in parents), name.rstrip("/")])
        paths.append(path)
        if name.endswith("/"):
            parents.append((indent, name.rstrip("/")))
    return paths


def readme_paths() -> list[str]:
    return tree_paths((ROOT / "README.md").read_text())


def test_every_path_named_exists():
    paths = readme_paths()
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "folder", [*FOLDERS, *TESTS, "protos/pagewire", "protos/pagewire/runtime", "protos/pagewire/v1"]
)
def test_every_module_is_named(folder):
    """A fresh reader finds the file of any behaviour from the tree alone."""
    suffix = "*.proto" if folder.endswith("/v1") else "*.py"
    files = {path.name for path in (ROOT / folder).glob(suffix)} - NOT_NAMED
    named = {path.rsplit("/", 1)[1] for path in readme_paths() if path.startswith(f"{folder}/")}
    assert sorted(files - named) == []


def test_the_tree_reader():
    text = (
        "```\npagewire/\n├── core_svc/   brain\n│   ├── engine.py   loop\n│   └── wire.py\n└── Makefile   words\n```\n"
    )
    assert tree_paths(text) == ["core_svc", "core_svc/engine.py", "core_svc/wire.py", "Makefile"]
    spaces = "```text\npagewire/\n  core_svc/     the brain\n    engine.py   loop\n  Makefile      words\n```\n"
    assert tree_paths(spaces) == ["core_svc", "core_svc/engine.py", "Makefile"]
