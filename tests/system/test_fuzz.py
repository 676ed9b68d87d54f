"""Malformed input to the three services: always a status, never a dead process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.client import Client
from pagewire.runtime.transport import sync_channel
from pagewire.v1 import core_pb2, frontend_pb2, worker_pb2
from tests.system.deployment import WORKER_FLAGS, Deployment
from tests.system.messages import messages

CALL_S = 1.0
METHODS = [
    method
    for module in (frontend_pb2, core_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
# What a fuzzer may well do on purpose: no deployment answers after it, and none should.
LOUD = settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Deployment]:
    """A deployment of its own, with a second worker that nobody owns.

    By its contract a worker leaves the core that it served when a stranger shakes hands, so fuzzing that one would end
    the core.
    """
    with Deployment() as deployment:
        served = deployment.processes["worker"]
        try:
            deployment.start("worker", *WORKER_FLAGS)
            yield deployment
            deployment.processes["worker"].stop()
        finally:
            deployment.processes["worker"] = served


def _service(method: MethodDescriptor) -> str:
    name: str = method.containing_service.name
    return {"FrontendService": "frontend", "EngineCoreService": "core", "WorkerService": "worker"}[name]


def _call(channel: grpc.Channel, method: MethodDescriptor, requests: list[Any], serializer: Any) -> grpc.StatusCode:
    """Calls and reads a few responses; the status, OK where the call was left alive by us."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(path, request_serializer=serializer, response_deserializer=parse)
    argument = iter(requests) if method.client_streaming else requests[0]
    try:
        response = call(argument, timeout=CALL_S)
        if method.server_streaming:
            for _ in range(5):
                if next(response, None) is None:
                    break
            response.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _is_alive(channel: grpc.Channel) -> bool:
    request = health_pb2.HealthCheckRequest(service="liveness")
    response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.containing_service.name}.{m.name}")
def test_any_message_gets_a_status(fuzzed, method):
    """Whatever well-typed message comes: OK or a status that is not the service's own fault, and the process lives.

    Case: vllm#16529
    Case: smg#1351
    Case: vllm#43226
    """
    service = _service(method)
    with sync_channel(fuzzed.address(service)) as channel:

        @LOUD
        @given(st.lists(messages(method.input_type), min_size=1, max_size=3))
        def check(requests):
            code = _call(channel, method, requests, type(requests[0]).SerializeToString)
            assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), requests

        check()
        assert _is_alive(channel)
    assert fuzzed.processes[service].popen.poll() is None


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.containing_service.name}.{m.name}")
def test_any_bytes_get_a_status(fuzzed, method):
    """Bytes that are no message at all."""
    service = _service(method)
    with sync_channel(fuzzed.address(service)) as channel:

        @settings(LOUD, max_examples=6)
        @given(st.lists(st.binary(max_size=64), min_size=1, max_size=3))
        def check(requests):
            _call(channel, method, requests, lambda data: data)

        check()
        assert _is_alive(channel)
    assert fuzzed.processes[service].popen.poll() is None


def test_the_frontend_answers_after_bad_requests(deployment):
    """A good request is served in the midst of bad ones.

    Case: vllm#43226
    """
    method = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"].methods_by_name["Generate"]
    with sync_channel(deployment.address("frontend")) as channel, Client(deployment.address("frontend")) as client:

        @settings(LOUD, max_examples=20)
        @given(messages(method.input_type))
        def check(request):
            _call(channel, method, [request], type(request).SerializeToString)

        check()
        assert "Paris" in client.complete("The capital of France is", max_tokens=4, temperature=0, timeout_s=60).text
