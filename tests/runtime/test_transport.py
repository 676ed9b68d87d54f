"""Connections: limits and keepalive agree on both ends, frozen peers are found, strangers get a clear message."""

from __future__ import annotations

import asyncio
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest

from pagewire.errors import UnavailableError
from pagewire.runtime import transport
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import channel_options, secure_or_insecure_channel, server_options, sync_channel
from pagewire.v1 import frontend_pb2, frontend_pb2_grpc


def test_both_ends_agree():
    """Limits are equal in both directions on both ends; servers allow pings more often than clients send them.

    Case: sglang#19986
    """
    server, client = dict(server_options()), dict(channel_options())
    for options in (server, client):
        assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 64 * 2**20
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0
        # Without it a frozen peer stays unnoticed for 60 s.
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"] <= 10_000
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.so_reuseport"] == 0


@pytest.mark.parametrize("do_ends_agree", [True, False])
def test_pings_in_a_long_silence(with_server, monkeypatch, do_ends_agree):
    """A stream that is silent for many pings lives where the ends agree (and dies where they don't: the control).

    Case: sglang#19986
    """
    monkeypatch.setattr(transport, "MIN_PING_INTERVAL_MS", 50 if do_ends_agree else 60_000)

    async def body(harness):
        # The server keeps its slow pings: each would put the client's next one off.
        monkeypatch.setattr(transport, "KEEPALIVE_TIME_MS", 100)
        async with secure_or_insecure_channel(f"127.0.0.1:{harness.port}") as channel:
            stream = frontend_pb2_grpc.FrontendServiceStub(channel).Generate(frontend_pb2.GenerateRequest())
            assert (await stream.read()).request_id == "first"
            # grpc sends at most one ping a second; the fourth that comes too early is one too many.
            await asyncio.sleep(6)
            harness.servicer.gate.set()
            if do_ends_agree:
                assert (await stream.read()).is_finished
            else:
                with pytest.raises(grpc.aio.AioRpcError, match=r"too_many_pings|Too many pings"):
                    await stream.read()

    with_server(body)


_FROZEN_SERVER = """
import asyncio
from tests.runtime.conftest import running
async def main():
    async with running() as harness:
        print(harness.port, flush=True)
        await asyncio.sleep(120)
asyncio.run(main())
"""


@pytest.mark.slow
def test_frozen_peer_ends_the_stream():
    """A peer that is stopped, its sockets open, is found by keepalive within 20 s."""
    process = subprocess.Popen([sys.executable, "-c", _FROZEN_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with sync_channel(f"127.0.0.1:{port}") as channel:
            stream = frontend_pb2_grpc.FrontendServiceStub(channel).Generate(frontend_pb2.GenerateRequest())
            assert next(stream).request_id == "first"
            os.kill(process.pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - started < 20
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_grpc_client_at_an_http1_port():
    """A gRPC client that meets an HTTP/1 server is told so in words.

    Case: sglang#11736
    """

    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with sync_channel(f"127.0.0.1:{server.server_port}") as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    frontend_pb2_grpc.FrontendServiceStub(channel).ListModels(
                        frontend_pb2.ListModelsRequest(), timeout=20
                    )
                error = from_rpc_error(caught.value)
        finally:
            server.shutdown()
            thread.join()
    assert isinstance(error, UnavailableError)
    assert "HTTP/1" in error.message
    assert "gRPC port" in error.message


def test_http1_client_at_a_grpc_port(with_server):
    """An HTTP/1 client is cut off at once and harms nobody.

    grpcio's listener can't be taught to answer HTTP/1: it sends its HTTP/2 SETTINGS and closes, and curl says
    "Received HTTP/0.9 when not allowed". The clear message of this row is on the side that we own, in the test above.

    Case: sglang#11736
    """

    async def body(harness):
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        # An HTTP/2 frame header of type SETTINGS (4), by which tools recognize an HTTP/2-only port.
        assert answer[3] == 4
        assert (await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="abc"))).token_ids == [3]

    with_server(body)


def test_nobody_listens():
    """A refused connection is UNAVAILABLE at once, not after a timeout."""

    async def main():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            async with secure_or_insecure_channel(f"127.0.0.1:{unused.getsockname()[1]}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await frontend_pb2_grpc.FrontendServiceStub(channel).ListModels(
                        frontend_pb2.ListModelsRequest(), timeout=20
                    )
                assert isinstance(from_rpc_error(caught.value), UnavailableError)

    asyncio.run(asyncio.wait_for(main(), 10))
