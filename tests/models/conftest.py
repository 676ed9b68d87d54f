"""Makes the helper modules of this folder importable; loads what several files use once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from worker_svc.fetch import resolve_model

    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """By name of a tiny model: its Hugging Face directory, written once."""
    import tiny_models

    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory
