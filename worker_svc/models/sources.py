"""From what a user calls a model to files on disk, their configuration, and their identity."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.errors import InvalidArgumentError, NotFoundError, PagewireError, UnavailableError, violation
from worker_svc.fetch import resolve_model

HUB_TIMEOUT_S = 10.0
_EDGE_BYTES = 1 << 20
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: a Hugging Face directory, or a directory and the GGUF file in it."""

    name: str
    """What clients call it."""
    directory: Path
    gguf_file: str = ""
    revision: str = ""

    @property
    def path(self) -> Path:
        return self.directory / self.gguf_file if self.gguf_file else self.directory

    def load_args(self) -> dict[str, Any]:
        """Keyword arguments with which transformers' from_pretrained reads these files."""
        args: dict[str, Any] = {"local_files_only": True}
        return {**args, "gguf_file": self.gguf_file} if self.gguf_file else args

    def weight_paths(self) -> list[Path]:
        """The files that hold weights; the shards of the index where there is one. Empty: there are none."""
        if self.gguf_file:
            return [self.path]
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            return sorted({self.directory / name for name in json.loads(index.read_text())["weight_map"].values()})
        single = self.directory / "model.safetensors"
        return [single] if single.is_file() else sorted(self.directory.glob("*.safetensors"))


def locate(source: str, revision: str = "") -> ModelFiles:
    """The files of an alias, a local directory, a local GGUF file or a hub id.

    Raises NotFoundError, UnavailableError (a hub or an index that can't be reached) and InvalidArgumentError (files
    that are cut off or no model).
    """
    found = resolve_model(source, show_progress=False)
    if isinstance(found, str):
        return ModelFiles(source, _download(found, revision), revision=revision)
    is_path = Path(source).expanduser().exists()
    path = found.resolve()
    if path.is_dir():
        return ModelFiles(path.name if is_path else source, path)
    return ModelFiles(path.stem if is_path else source, path.parent, path.name)


def read_config(files: ModelFiles) -> Any:
    """The transformers configuration. Raises InvalidArgumentError where transformers can't read it."""
    try:
        return AutoConfig.from_pretrained(files.directory, **files.load_args())
    except Exception as error:  # whatever a wrong value makes of transformers' validation, division by zero included
        problem = f"transformers can't read its configuration: {type(error).__name__}: {error}"
        raise _bad(files, problem) from error


def architecture_of(config: Any) -> str:
    """Name of the model's class, such as LlamaForCausalLM.

    Raises InvalidArgumentError where the model does not generate text.
    """
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    known = (names,) if isinstance(names, str) else tuple(names)
    declared = [name for name in config.architectures or () if name in known]
    if not known:
        found = ", ".join(config.architectures or ()) or config.model_type
        raise InvalidArgumentError(
            [violation("model", found, "is no decoder-only architecture of transformers")],
            reason="UNSUPPORTED_ARCHITECTURE",
        )
    return str(declared[0] if declared else known[0])


def weights_id(config: Any, paths: list[Path]) -> str:
    """Sha256 over the configuration and, for each weight file, its size and its first and last MiB.

    Names and times do not count, so that copies of a model have one identity.
    """
    settings = {key: value for key, value in config.to_dict().items() if key not in _NO_IDENTITY}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for part in sorted(_file_identity(path) for path in paths):
        digest.update(part)
    return digest.hexdigest()


_NO_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


def _file_identity(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(0, size - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return digest.digest()


def _download(hub_id: str, revision: str) -> Path:
    silence = ""
    try:
        with _bounded_waits():
            silence = _why_out_of_reach(hub_id, revision)
            return Path(
                huggingface_hub.snapshot_download(
                    hub_id,
                    revision=revision or None,
                    allow_patterns=_HUB_PATTERNS,
                    etag_timeout=HUB_TIMEOUT_S,
                    local_files_only=bool(silence),
                )
            )
    except RevisionNotFoundError as error:
        raise NotFoundError(f"model {hub_id!r} has no revision {revision!r} on the hub", reason="NOT_FOUND") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise NotFoundError(
            f"model {hub_id!r} is neither a local path nor a model on the hub that can be read (a private one needs "
            "a token)",
            reason="MODEL_NOT_FOUND",
        ) from error
    except (OSError, HfHubHTTPError) as error:
        raise UnavailableError(
            f"model {hub_id!r} is not on this machine and the hub can't be reached: {silence or error}",
            reason="MODEL_FETCH_FAILED",
        ) from error


def _why_out_of_reach(hub_id: str, revision: str) -> str:
    """Asks the hub for the model; what went wrong where it does not answer in time, else empty.

    snapshot_download asks the same thing first and would wait for ever; it has no parameter for that.
    """
    try:
        huggingface_hub.HfApi().model_info(hub_id, revision=revision or None, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return ""  # an answer, which snapshot_download will get and judge again
    except Exception as error:  # the HTTP client's own, and which client that is changes with the hub library
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _bounded_waits() -> Iterator[None]:
    """Within it no request to the hub waits longer than HUB_TIMEOUT_S, unless it says so: the default is for ever."""
    session = huggingface_hub.get_session()
    before, session.timeout = session.timeout, HUB_TIMEOUT_S
    try:
        yield
    finally:
        session.timeout = before


def _bad(files: ModelFiles, problem: str) -> PagewireError:
    return InvalidArgumentError([violation("model", str(files.path), problem)], reason="BAD_MODEL_FILES")
