"""A gRPC server that sends a message of a fixed content to each of its streams at a fixed pace: a frontend's floor.

    python bench/bare_server.py STEP_SECONDS

It is what grpc.aio costs by itself: one coroutine per stream, woken once per step, and one write.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc.aio

from pagewire.runtime.ready import print_ready
from pagewire.runtime.transport import MAX_MESSAGE_BYTES, server_options
from pagewire.v1 import frontend_pb2


class Streams(grpc.GenericRpcHandler):
    """Answers any method."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        message = frontend_pb2.GenerateResponse(request_id="0123456789abcdef01234567")
        message.outputs.add(text=" hello", token_ids=[1234])
        self._message = message.SerializeToString()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        for _ in range(frontend_pb2.GenerateRequest.FromString(request).sampling_params.max_tokens):
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            yield self._message

    def step(self) -> None:
        """Lets every stream send one message."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


async def serve(step_s: float) -> None:
    """Runs until the process is killed."""
    streams, server = Streams(), grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
    server.add_generic_rpc_handlers([streams])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print_ready("frontend", "127.0.0.1", port, "bare")
    while True:
        await asyncio.sleep(step_s)
        streams.step()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
