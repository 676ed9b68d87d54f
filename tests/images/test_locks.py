"""The lock files of the images are what pyproject.toml asks for today."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from k8s.tools import lock

PYPROJECT = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())
WORKER = sorted([*lock.requirements(PYPROJECT, ["worker"]), *lock.WORKER_ALSO])
INPUTS = {
    "frontend": lock.requirements(PYPROJECT, ["frontend"]),
    "core": lock.requirements(PYPROJECT, ["core"]),
    "worker-cpu": WORKER,
    "worker-cuda": WORKER,
    "torch": WORKER,
    "build": lock.build_requirements(PYPROJECT),
}
# What is installed together: the locks of an image.
IMAGES = {
    "frontend": ["frontend"],
    "core": ["core"],
    "worker-cpu": ["worker-cpu", "torch"],
    "worker-cuda": ["worker-cpu", "worker-cuda"],
    "build": ["build"],
}


def text(name: str) -> str:
    return (lock.LOCKS / f"{name}.txt").read_text()


def pins(name: str) -> dict[str, Version]:
    """Package -> version, by canonical name."""
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text(name), re.MULTILINE)
    return {canonicalize_name(package): Version(version) for package, version in found}


def problems(inputs: list[str], pinned: dict[str, Version]) -> list[str]:
    """Requirements that the pins do not meet."""
    wanted = [Requirement(line) for line in inputs]
    return [
        str(one)
        for one in wanted
        if (one.marker is None or one.marker.evaluate())
        and (
            canonicalize_name(one.name) not in pinned
            or not one.specifier.contains(pinned[canonicalize_name(one.name)], prereleases=True)
        )
    ]


@pytest.mark.parametrize("name", IMAGES)
def test_every_requirement_is_pinned_within_its_range(name):
    pinned = {package: version for part in IMAGES[name] for package, version in pins(part).items()}
    assert problems(INPUTS[name], pinned) == []


@pytest.mark.parametrize("name", INPUTS)
def test_no_lock_is_stale(name):
    """`make locks` writes what it was made for into the header."""
    assert f"# inputs: {lock.digest(INPUTS[name])}\n" in text(name)


@pytest.mark.parametrize("name", sorted(set(INPUTS) - {"torch"}))
def test_every_pin_has_hashes(name):
    blocks = dict(lock.blocks(text(name)))
    assert len(blocks) == len(pins(name)) > 3
    assert [package for package, block in blocks.items() if "--hash=sha256:" not in block] == []


def test_images_are_without_what_they_do_not_need():
    heavy = {"torch", "transformers", "triton", "numba", "accelerate"}
    assert heavy.isdisjoint(pins("frontend"))
    assert heavy.isdisjoint(pins("core"))
    assert "tokenizers" not in pins("core")
    assert "tokenizers" in pins("frontend")
    assert not [name for name in pins("worker-cpu") if name.startswith("nvidia")]


def test_one_torch_for_both_workers():
    assert pins("torch")["torch"] == pins("worker-cuda")["torch"]


def test_shared_packages_have_one_version():
    """Services speak to each other: what they are made of should not differ by image."""
    seen: dict[str, set[Version]] = {}
    for name in ("frontend", "core", "worker-cpu", "worker-cuda"):
        for package, version in pins(name).items():
            seen.setdefault(package, set()).add(version)
    assert {package: versions for package, versions in seen.items() if len(versions) > 1} == {}


def test_no_file_of_k8s_names_an_index():
    """Addresses come from the configuration of who builds."""
    folder = Path(lock.ROOT / "k8s")
    files = [path for path in folder.rglob("*") if path.suffix in (".txt", ".sh", ".py") or path.name == "Dockerfile"]
    assert len(files) > 10
    assert [path for path in files if re.search(r"(?:--index-url|PIP_INDEX_URL)[= ]+https?:", path.read_text())] == []


def test_the_checks_find_faults():
    assert problems(["grpcio>=1.80,<2"], {"grpcio": Version("1.79")}) == ["grpcio<2,>=1.80"]
    assert problems(["jinja2>=3"], {}) == ["jinja2>=3"]
    assert lock.digest(["a"]) != lock.digest(["a", "b"])
