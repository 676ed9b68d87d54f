"""Who may import whom, by import-linter's contracts and by looking at real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_contracts():
    """All contracts of pyproject.toml are kept."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_domain_contract_finds_a_planted_import(tmp_path):
    """Control: a domain module that imports grpc breaks the contract of our own kind."""
    import grimp

    from tests.architecture.domain_contract import DomainContract

    for name, text in {"__init__": "", "scheduler": "import grpc", "server": "import grpc"}.items():
        (tmp_path / "some_svc").mkdir(exist_ok=True)
        (tmp_path / "some_svc" / f"{name}.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        graph = grimp.build_graph("some_svc", include_external_packages=True, cache_dir=None)
    finally:
        sys.path.remove(str(tmp_path))
    options = {"services": ["some_svc"], "edge": ["server"], "name": "x"}
    check = DomainContract(name="x", session_options={}, contract_options=options).check(graph, verbose=False)
    assert check.metadata["found"] == ["some_svc.scheduler -> grpc"]


HEAVY = ("torch", "triton", "numba", "transformers")


@pytest.mark.parametrize(
    ("package", "also_forbidden"),
    [
        ("frontend_svc", ()),
        ("core_svc", ("tokenizers", "jinja2")),
        ("pagewire", ("tokenizers", "jinja2", "frontend_svc", "core_svc", "worker_svc")),
    ],
)
def test_processes_load_no_torch(package, also_forbidden):
    """Importing every module of a package, as its process could, loads none of the heavy libraries."""
    code = f"""
import importlib, json, pkgutil, sys
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
if "{package}" != "pagewire":
    importlib.import_module("{package}.__main__")
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert package in loaded
    assert not loaded & {*HEAVY, *also_forbidden}
