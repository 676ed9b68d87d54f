"""A small HTTP server on a thread of its own that answers GET /metrics, whatever its clients do.

One request per connection, a few connections at a time, each over after a few seconds: a client that reads slowly or
sends nothing holds a thread for that long and nobody up.
"""

from __future__ import annotations

import gzip
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
MAX_CONNECTION_S = 10.0
IO_TIMEOUT_S = 5.0
PATH = "/metrics"

Render = Callable[[str], tuple[bytes, str]]
"""Takes the Accept header; returns the text and its content type."""


class _Handler(BaseHTTPRequestHandler):
    timeout = IO_TIMEOUT_S
    server: MetricsHttpServer

    def do_GET(self) -> None:
        if self.path.split("?", 1)[0] != PATH:
            self.send_error(404, "only /metrics is here")
            return
        body, content_type = self.server.render(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # One sendall: its timeout bounds all of it, not each part.
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class MetricsHttpServer(ThreadingHTTPServer):
    """Serves from `start` to `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, host: str, port: int, render: Render) -> None:
        """Listens; port 0 takes a free one. Raises OSError where the address can't be had."""
        self.render = render
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise OSError(
                f"cannot listen on {host}:{port} for metrics: {error.strerror or error}; "
                "choose others with --metrics-host and --metrics-port (0 takes a free port)"
            ) from error
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.25}, name="metrics-http", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Without the reverse look-up of the host's name that the base class makes, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stops listening; what is being answered may end."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or its end where too many are open."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Runs on the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)
            self._slots.release()

    def service_actions(self) -> None:
        """Ends the connections that take too long; called a few times per second."""
        too_old = time.monotonic() - MAX_CONNECTION_S
        for request, opened in list(self._open.items()):
            if opened < too_old:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    logger.debug("a connection ended by itself")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; a fault of ours is."""
        logger.debug("a request for metrics from %s was not answered", client_address, exc_info=True)
