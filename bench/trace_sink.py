"""`python -m bench.trace_sink`: takes spans over OTLP/gRPC and throws them away unread; prints its port."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from bench.process_group import ROOT

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class TraceSink:
    """The sink as a process of its own, so that its work is nobody else's."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.trace_sink"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


def main() -> int:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((_Handler(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
