"""The contract's files: lint, format, and generated code without drift."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environ)


def test_buf_lint_and_format():
    for command in (["lint"], ["format", "-d", "--exit-code"]):
        done = _run(BIN / "buf", *command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_has_no_drift(tmp_path):
    """Generating again gives exactly what is committed."""
    done = _run("bash", "protos/generate.sh", tmp_path)
    assert done.returncode == 0, done.stderr
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert len(fresh) == 16
    committed = ROOT / "protos"
    assert [str(name) for name, text in fresh.items() if (committed / name).read_text() != text] == []
