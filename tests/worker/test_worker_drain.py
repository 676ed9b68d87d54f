"""A worker that shuts down: whom it still serves, for how long, and whom it turns away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest

from pagewire.errors import UnavailableError
from pagewire.runtime.status import from_rpc_error
from tests.worker.mini_core import MiniCore, request
from tests.worker.worker_support import Client, ServerThread, Stream, write_tiny_model


@pytest.fixture
def server() -> Iterator[ServerThread]:
    server = ServerThread()
    yield server
    server.close()


def begin(server: ServerThread, tmp_path: Path) -> tuple[Client, Stream, MiniCore]:
    client = Client(server.address)
    client.handshake()
    client.load(str(write_tiny_model(tmp_path / "tiny")), load_format="dummy")
    client.initialize_cache()
    stream = client.stream()
    stream.opened()
    return client, stream, MiniCore(stream.execute, num_blocks=100, block_size=4)


def shut_down(server: ServerThread, grace_s: float, idle_s: float) -> Future[None]:
    assert server._loop is not None
    return asyncio.run_coroutine_threadsafe(server.servicer.shut_down(grace_s, idle_s), server._loop)


def ends_with(stream: Stream) -> UnavailableError:
    with pytest.raises(grpc.RpcError) as caught:
        stream.message()
    error = from_rpc_error(caught.value)
    assert isinstance(error, UnavailableError)
    return error


def test_steps_go_on_until_the_core_lets_go(server: ServerThread, tmp_path: Path) -> None:
    """A core that drains at the same time finishes what it has; nobody else gets the worker meanwhile.

    Case: llm-d-router#1885
    """
    client, stream, core = begin(server, tmp_path)
    ending = shut_down(server, 30.0, 5.0)
    for _ in range(3):
        assert len(core.generate([request([5, 6, 7])], 5)[0]) == 5
    other = Client(server.address, core="core-2")
    with pytest.raises(grpc.RpcError) as caught:
        other.handshake()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not ending.done()
    started = time.monotonic()
    stream.close()
    ending.result(5)
    assert time.monotonic() - started < 2
    client.close()
    other.close()


def test_an_idle_core_is_not_waited_for(server: ServerThread, tmp_path: Path) -> None:
    client, stream, core = begin(server, tmp_path)
    core.generate([request([5, 6, 7])], 5)
    started = time.monotonic()
    shut_down(server, 30.0, 0.3).result(5)
    assert 0.25 < time.monotonic() - started < 3
    assert ends_with(stream).reason == "SHUTTING_DOWN"
    client.close()


def test_a_core_that_does_not_end_is_cut_off(server: ServerThread, tmp_path: Path) -> None:
    client, _, core = begin(server, tmp_path)
    started = time.monotonic()
    ending = shut_down(server, 0.5, 0.3)
    with pytest.raises(grpc.RpcError) as caught:
        while time.monotonic() - started < 5:
            core.generate([request([5, 6, 7])], 5)
    assert from_rpc_error(caught.value).reason == "SHUTTING_DOWN"
    assert 0.4 < time.monotonic() - started < 3
    ending.result(5)
    client.close()


def test_without_a_core_nothing_is_waited_for(server: ServerThread) -> None:
    shut_down(server, 30.0, 30.0).result(1)
