"""Where compiled kernels are kept, and when they are compiled anew."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels.cpu
from kernels.cpu import jit

PACKAGE = Path(jit.__file__).parent.parent
ROOT = PACKAGE.parent


@pytest.fixture(autouse=True)
def no_folder_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_cache_dir", None)


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(jit.CACHE_VARIABLE, raising=False)
    assert jit.cache_dir().parent == tmp_path / "cache" / "pagewire" / "kernels"
    monkeypatch.setattr(jit, "_cache_dir", None)
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert jit.cache_dir().parent == tmp_path / "mine"


@pytest.mark.parametrize("changed", ["weights.py", "cpu/vectors.py"])
def test_any_source_of_the_package_changes_the_folder(tmp_path: Path, changed: str) -> None:
    """Kernels of cpu/ hold constants of files beside it, such as UNIT_BITS, whose change numba does not see."""
    copy = tmp_path / "kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = jit._sources_digest(copy)
    assert before == jit._sources_digest(copy)
    (copy / changed).write_text((copy / changed).read_text() + "\nX = 1\n")
    assert jit._sources_digest(copy) != before


@pytest.mark.parametrize("problem", ["a file", "open to all"])
def test_a_folder_that_cannot_be_trusted_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    chosen = tmp_path / "chosen"
    if problem == "a file":
        chosen.write_text("")
    else:
        (chosen / jit._sources_digest(PACKAGE)).mkdir(parents=True)
        (chosen / jit._sources_digest(PACKAGE)).chmod(0o777)
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(chosen))
    with caplog.at_level(logging.WARNING):
        used = jit.cache_dir()
    assert chosen not in used.parents and used.is_dir() and used.stat().st_mode & 0o077 == 0
    assert "compiled kernels can't be kept in" in caplog.text


def test_processes_that_compile_at_once_keep_each_others_code_apart(tmp_path: Path) -> None:
    """Each compiles one function for types of its own, with its files slowed down so that they meet."""
    script = """
import sys, time
from numba.core import caching
save_index = caching.IndexDataCacheFile._save_index
def slow(self, overloads):
    time.sleep(0.3)
    save_index(self, overloads)
caching.IndexDataCacheFile._save_index = slow
from kernels.cpu import jit
from tests.kernels.twice import twice
print(repr(twice(eval(sys.argv[1]))))
"""
    environment = os.environ | {jit.CACHE_VARIABLE: str(tmp_path)}
    values = ["3", "1.5", "1.5j", "True"]
    for is_second in (False, True):
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", script, value], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            for value in values
        ]
        assert [run.communicate(timeout=120)[0].strip() for run in runs] == ["6", "3.0", "3j", "2"], is_second
    kept = [path.name for path in tmp_path.rglob("*.nbc")]
    assert len(kept) == len(values)


def test_every_kernel_that_is_made_has_a_name_of_its_own() -> None:
    """Two functions of one name close over the same, so that either may stand for the other.

    Kept by two processes, attention in float32 and in bfloat16 had the same symbols, and a third gave NaN.
    """
    from numba.core.dispatcher import Dispatcher

    for module in pkgutil.iter_modules(kernels.cpu.__path__):
        importlib.import_module(f"kernels.cpu.{module.name}")
    functions = [kernel.py_func for kernel in gc.get_objects() if issubclass(type(kernel), Dispatcher)]
    functions += [kernel._function for kernel in gc.get_objects() if type(kernel) is jit.Chunks]
    made = [f for f in functions if f.__module__.startswith("kernels.") and f.__closure__]
    assert len(made) > 20
    contents: dict[tuple[str, str], str] = {}
    for function in made:
        assert "@" in function.__qualname__, f"{function.__module__}.{function.__qualname__}"
        found = contents.setdefault((function.__module__, function.__qualname__), jit._content(function))
        assert found == jit._content(function)
