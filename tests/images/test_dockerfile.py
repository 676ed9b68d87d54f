"""The Dockerfile as text: a real linter, and what every image must be. The built images: test_built_images.py."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k8s.tools import lock, pip_conf

DOCKERFILE = lock.ROOT / "k8s" / "Dockerfile"
TARGETS = {"frontend": "frontend_svc", "core": "core_svc", "worker-cpu": "worker_svc", "worker-cuda": "worker_svc"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments), comments left out and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def stages(text: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Stage -> (what it stands on, its instructions)."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for word, rest in instructions(text):
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            found[name] = (base, [])
        elif found:
            found[name][1].append((word, rest))
    return found


STAGES = stages(DOCKERFILE.read_text())


def whole(target: str) -> list[tuple[str, str]]:
    """The instructions of a target, of what it stands on first."""
    base, own = STAGES[target]
    return [*(whole(base) if base in STAGES else []), *own]


def run_hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).with_name("hadolint")
    return subprocess.run([hadolint, "--format", "json", path], capture_output=True, text=True, timeout=60)


def test_the_linter_has_nothing_to_say(tmp_path):
    done = run_hadolint(DOCKERFILE)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("--no-install-recommends", ""))
    assert run_hadolint(bad).returncode == 1


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_one_service_as_nobody(target):
    own = whole(target)
    users = [rest for word, rest in own if word == "USER"]
    assert users[-1] == "10001:10001"
    entrypoints = [json.loads(rest) for word, rest in own if word == "ENTRYPOINT"]
    assert entrypoints == [["/usr/bin/tini", "--", "/opt/pagewire/bin/python", "-m", TARGETS[target]]]
    assert ("STOPSIGNAL", "SIGTERM") in own
    assert [word for word, _ in own if word in ("HEALTHCHECK", "CMD", "VOLUME", "ADD")] == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_copies_what_was_made_for_it_and_installs_no_compiler(target):
    copied = [rest for word, rest in whole(target) if word == "COPY"]
    assert copied == [
        "--from=builder /usr/bin/tini-static /usr/bin/tini",
        f"--from={target}-packages /opt/pagewire /opt/pagewire",
    ]
    runs = " ".join(rest for word, rest in whole(target) if word == "RUN")
    installed = [" ".join(words.split()) for words in re.findall(r"apt-get install ([^&]*)", runs)]
    assert installed == (["-y --no-install-recommends libgomp1"] if target.startswith("worker") else [])
    assert "pip" not in runs.replace("pipefail", "")


def test_no_index_and_no_secret_in_a_layer():
    """What pip is configured for is seen while a step runs only."""
    text = DOCKERFILE.read_text()
    assert "http" not in text
    for name, (_, own) in STAGES.items():
        for word, rest in own:
            fetches = word == "RUN" and re.search(r"pip install|install\.sh (locked|torch)", rest)
            assert not fetches or "--mount=type=secret,id=pip,target=/etc/pip.conf" in rest, (name, rest)


def test_what_is_copied_is_not_ignored():
    """.dockerignore names what goes to the builder; everything that is copied from there is named."""
    ignore = (lock.ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    sources = {
        source
        for _, own in STAGES.values()
        for word, rest in own
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert sources >= {"protos", "k8s/requirements/build.txt"}
    assert [s for s in sources if s not in allowed and s.rpartition("/")[0] not in allowed] == []
    assert [path for path in allowed | sources if not (lock.ROOT / path).exists()] == []


def test_the_ready_made_compiler(tmp_path):
    """`cc` of the CUDA image hands over the one module that was compiled, and nothing for another source."""
    cc = tmp_path / "cc"
    cc.write_text((DOCKERFILE.parent / "tools" / "prebuilt_cc.sh").read_text())
    cc.chmod(0o755)
    (tmp_path / "driver.c").write_text("int x;")
    (tmp_path / "other.c").write_text("int y;")
    (tmp_path / "cuda_utils.so").write_bytes(b"module")
    (tmp_path / "cuda_utils.sha256").write_text(hashlib.sha256(b"int x;").hexdigest() + "\n")
    out = tmp_path / "out.so"

    def compile_file(source: str) -> subprocess.CompletedProcess[str]:
        # As Triton 3.7 and 3.9 call it.
        words = [cc, tmp_path / source, "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", out, "-l:libcuda.so.1"]
        return subprocess.run([*words, "-L/nowhere", "-I/nowhere"], capture_output=True, text=True, timeout=10)

    refused = compile_file("other.c")
    assert refused.returncode == 1 and "no C compiler" in refused.stderr and not out.exists()
    assert compile_file("driver.c").returncode == 0
    assert out.read_bytes() == b"module"


def test_what_a_build_is_told_of_pip():
    listing = "\n".join(
        [
            ":env:.find-links='/own/wheels'",
            "global.index-url='https://index.invalid/simple'",
            "global.extra-index-url='file:///disk/simple https://more.invalid/simple'",
            "global.find-links='/other/wheels'",
            "global.constraint='/etc/limits.txt'",
            "global.default-timeout='180'",
        ]
    )
    assert pip_conf.settings(listing) == {
        "index-url": ["https://index.invalid/simple"],
        "extra-index-url": ["https://more.invalid/simple"],
        "find-links": ["/own/wheels"],
        "timeout": ["180"],
    }
