"""Errors there and back over a real connection."""

from __future__ import annotations

import logging

import grpc
import pytest

from pagewire import errors
from pagewire.errors import InvalidArgumentError, violation
from pagewire.runtime.status import from_rpc_error
from pagewire.v1 import frontend_pb2

SIMPLE = [
    errors.AlreadyExistsError,
    errors.NotFoundError,
    errors.FailedPreconditionError,
    errors.AbortedError,
    errors.DeadlineExceededError,
    errors.UnimplementedError,
    errors.InternalError,
]


async def _fail(harness, error):
    harness.servicer.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="x"))
    return caught.value


@pytest.mark.parametrize("cls", SIMPLE)
def test_class_message_reason_and_metadata_survive(with_server, cls):
    """A whole-RPC failure is a status code with details, and comes back as the same class.

    Case: sglang#19972
    """

    async def body(harness):
        error = await _fail(harness, cls("it is broken: ü", reason="SOME_REASON", metadata={"key": "value"}))
        assert error.code().name == cls.code
        found = from_rpc_error(error)
        assert type(found) is cls
        assert (found.message, found.reason, found.metadata) == ("it is broken: ü", "SOME_REASON", {"key": "value"})

    with_server(body)


@pytest.mark.parametrize("cls", [errors.ResourceExhaustedError, errors.UnavailableError])
def test_retry_hint_survives(with_server, cls):
    """RetryInfo carries when to come back.

    Case: TGI#439
    """

    async def body(harness):
        found = from_rpc_error(await _fail(harness, cls("full", retry_after_s=1.25)))
        assert type(found) is cls
        assert found.retry_after_s == pytest.approx(1.25)

    with_server(body)


def test_violations_survive(with_server):
    """Field path, value and limit of every violation come back, odd characters too."""
    sent = [
        violation("sampling_params.top_p", 1.5, "must be in (0, 1]"),
        violation("messages[2].role", "a (found b): ü\ud800", "must be a role"),
    ]

    async def body(harness):
        found = from_rpc_error(await _fail(harness, InvalidArgumentError(sent)))
        assert isinstance(found, InvalidArgumentError)
        assert found.violations[0] == sent[0]
        assert found.violations[1].field == "messages[2].role"
        assert found.violations[1].limit == "must be a role"
        assert "a (found b): ü" in found.violations[1].value
        assert "sampling_params.top_p is 1.5: must be in (0, 1]" in found.message

    with_server(body)


@pytest.mark.parametrize("character", ["x", "ü", "🙂", "\n"])
def test_huge_errors_stay_within_the_metadata_limit(with_server, character):
    """A thousand violations with long texts still arrive as INVALID_ARGUMENT, shortened."""

    async def body(harness):
        many = [violation(f"stop[{i}]{character * 50}", character * 5000, character * 400) for i in range(1000)]
        error = await _fail(harness, InvalidArgumentError(many))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        found = from_rpc_error(error)
        assert isinstance(found, InvalidArgumentError)
        assert found.violations

    with_server(body)


def test_unexpected_exception_is_internal_without_internals(with_server, caplog):
    """The caller learns nothing of the inside; the log has the traceback; the server lives."""

    async def body(harness):
        with caplog.at_level(logging.ERROR):
            error = await _fail(harness, KeyError("secret detail"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        assert any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records)
        harness.servicer.error = None
        assert (await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="abc"))).token_ids == [3]

    with_server(body)


def test_error_in_the_middle_of_a_stream(with_server):
    """What was sent arrives, then the status.

    Case: sglang#19972
    """

    async def body(harness):
        harness.servicer.error = errors.UnavailableError("the core is gone", retry_after_s=0.5)
        stream = harness.stub.Generate(frontend_pb2.GenerateRequest())
        assert (await stream.read()).request_id == "first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        found = from_rpc_error(caught.value)
        assert isinstance(found, errors.UnavailableError)
        assert found.retry_after_s == pytest.approx(0.5)

    with_server(body)


def test_unimplemented_method_keeps_its_status(with_server):
    """Methods that grpc itself answers pass the interceptor."""

    async def body(harness):
        missing = harness.channel.unary_unary("/pagewire.v1.FrontendService/Nonsense")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await missing(b"")
        assert type(from_rpc_error(caught.value)) is errors.UnimplementedError

    with_server(body)


def test_upstream_failure_passes_through(with_server):
    """An AioRpcError that a handler lets out keeps its code."""

    async def body(harness):
        upstream = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="upstream is gone"
        )
        error = await _fail(harness, upstream)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "upstream is gone"

    with_server(body)


def test_malformed_bytes_are_a_status(with_server):
    """Bytes that are no message end the call, not the process."""

    async def body(harness):
        raw = harness.channel.unary_unary("/pagewire.v1.FrontendService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\xff\xff\xff\xff\xff")
        assert (await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="abc"))).token_ids == [3]

    with_server(body)


def test_bytes_that_are_no_message_are_an_invalid_argument(with_server):
    """gRPC's own answer is UNKNOWN with the text of a Python exception."""

    async def body(harness):
        call = harness.channel.unary_unary("/pagewire.v1.FrontendService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff\xff")
        found = from_rpc_error(caught.value)
        assert isinstance(found, InvalidArgumentError) and "protobuf" in found.message
        stream = harness.channel.unary_stream("/pagewire.v1.FrontendService/Generate")(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_server(body)
