"""The WorkerService's tokenizer and administrative commands over real gRPC on a tiny Llama."""

from pathlib import Path

import grpc
import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.types_wire import TokenizerAssembler
from tests.worker.mini_core import request
from tests.worker.worker_support import PROMPT, core_on, fails
from worker_svc.worker import Worker


def test_tokenizer_comes_in_checked_chunks(loaded):
    assembler = TokenizerAssembler()
    for chunk in loaded.tokenizer():
        assembler.add(chunk)
    assert "generation_config.json" in assembler.files()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(loaded, level):
    stream = loaded.stream()
    core = core_on(stream)
    before = core.generate([request(PROMPT)], 5)
    freed = loaded.utility(sleep={"level": level}).sleep.freed_bytes
    pool = 100 * 1024
    assert freed >= pool and (freed > pool) == (level == 2)
    assert loaded.utility(stats={}).stats.sleep_level == level
    assert loaded.handshake().epoch == 0
    stream.submit(core.plan([]))
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "no KV cache"):
        stream.message()
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "sleeps"):
        loaded.initialize_cache(epoch=2)
    loaded.utility(wake_up={})
    loaded.initialize_cache(epoch=2)
    assert core_on(loaded.stream(epoch=2), epoch=2).generate([request(PROMPT)], 5) == before


def test_profile_writes_a_trace(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEWIRE_PROFILE_DIR", str(tmp_path))
    core = core_on(loaded.stream())
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "does not run"):
        loaded.utility(profile={"start": False})
    path = loaded.utility(profile={"start": True}).profile.path
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "runs already"):
        loaded.utility(profile={"start": True})
    core.generate([request(PROMPT)], 2)
    assert loaded.utility(profile={"start": False}).profile.path == path
    assert path.startswith(str(tmp_path)) and "traceEvents" in Path(path).read_text()


def test_utilities_that_are_not_there(loaded):
    for command in ({"add_adapter": {}}, {"remove_adapter": {}}):
        with fails(grpc.StatusCode.UNIMPLEMENTED):
            loaded.utility(**command)
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "command"):
        loaded.utility()
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "level"):
        loaded.utility(sleep={"level": 3})


def test_a_device_that_torch_does_not_know_is_named():
    """An LLM or a process with a mistyped device gets the field, not torch's words."""
    with pytest.raises(InvalidArgumentError, match="device is 'tpu': must be cpu, cuda or cuda:<index>"):
        Worker(device="tpu")
