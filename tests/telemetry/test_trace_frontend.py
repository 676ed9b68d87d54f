"""The frontend's spans: whose child they are, what they say, and that every end has them; with a real engine behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import frontend_support
import grpc
import pytest
from frontend_support import CoreOptions, Frontend, collect, eventually, frontend, generate_request, run, status_of
from opentelemetry import context as ambient
from opentelemetry import trace
from small_tokenizers import sentencepiece_json
from trace_support import Traces, ids, parent

from core_svc.fake_executor import FakeOptions
from frontend_svc.observer import Observers
from frontend_svc.trace_observer import CAPTURE_VARIABLE, TraceObserver
from pagewire.errors import InternalError
from pagewire.v1 import frontend_pb2 as pb
from pagewire.v1 import types_pb2

SERVICE = "pagewire.v1.FrontendService"
TEMPLATE = {"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}
FILES = {
    "tokenizer.json": json.dumps(sentencepiece_json()).encode(),
    "tokenizer_config.json": json.dumps(
        {"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}
    ).encode(),
}
PROMPT = "hello world"


def with_frontend(
    traces: Traces, monkeypatch: pytest.MonkeyPatch, body: Callable[[Frontend], Awaitable[None]], **options: Any
) -> None:
    """Runs the body against a frontend that traces; nothing of its requests may be left."""
    monkeypatch.setattr(frontend_support, "VOCAB_SIZE", 277)
    observer = TraceObserver(traces.tracer, "127.0.0.1", lambda: 1)

    @contextlib.asynccontextmanager
    async def started() -> AsyncIterator[Frontend]:
        async with frontend("inprocess", FILES, CoreOptions(**options)) as found:
            found.service._observers = Observers([observer])
            yield found

    async def scenario() -> None:
        async with started() as found:
            await body(found)
            await eventually(lambda: not observer._open)
            await found.is_idle()

    run(scenario())


def metadata(context: Any) -> tuple[tuple[str, str], ...]:
    return (("traceparent", context.traceparent), ("tracestate", context.tracestate))


def test_the_clients_span_is_the_parent_and_the_core_gets_ours(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: vllm#33272"""
    above, seen = parent(tracestate="vendor=1"), []

    async def body(f: Frontend) -> None:
        call = f.stub.Generate(generate_request(PROMPT, max_tokens=30), metadata=metadata(above))
        await call.read()
        seen.extend(r.trace_context for r in list(f.engine.scheduler.requests.values()))
        await rest(call)

    with_frontend(traces, monkeypatch, body, options=FakeOptions(latency_s=0.01))
    server, generate = traces.spans.one(f"{SERVICE}/Generate"), traces.spans.one("generate")
    assert (server.trace_id, server.parent_id) == ids(above)
    (given,) = seen
    assert ids(given) == (server.trace_id, generate.span_id) and given.tracestate == "vendor=1"
    assert [name for name, _, _ in generate.events] == ["added", "first_token", "finished"]


@pytest.mark.parametrize(
    "traceparent",
    [
        "nonsense",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "",
    ],
)
def test_a_parent_that_is_none_is_ignored(traces: Traces, monkeypatch: pytest.MonkeyPatch, traceparent: str) -> None:
    """Case: llm-d-router#1514"""

    async def body(f: Frontend) -> None:
        call = f.stub.Generate(generate_request(PROMPT), metadata=(("traceparent", traceparent), ("tracestate", "=,")))
        await collect(call)

    with_frontend(traces, monkeypatch, body)
    assert traces.spans.one(f"{SERVICE}/Generate").parent_id == ""


def test_an_unsampled_parent_is_honoured_and_handed_on(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    above, seen = parent(is_sampled=False), []

    async def body(f: Frontend) -> None:
        call = f.stub.Generate(generate_request(PROMPT, max_tokens=30), metadata=metadata(above))
        await call.read()
        seen.extend(r.trace_context for r in list(f.engine.scheduler.requests.values()))
        await rest(call)

    with_frontend(traces, monkeypatch, body, options=FakeOptions(latency_s=0.01))
    assert traces.names() == []
    assert [context.traceparent[-3:] for context in seen] == ["-00"] and ids(seen[0])[0] == ids(above)[0]


def test_no_ambient_context_is_read(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: vllm#38672"""
    somebody = trace.SpanContext(0xABC, 0xDEF, True, trace.TraceFlags(1))

    async def body(f: Frontend) -> None:
        token = ambient.attach(trace.set_span_in_context(trace.NonRecordingSpan(somebody)))
        try:
            await collect(f.stub.Generate(generate_request(PROMPT)))
        finally:
            ambient.detach(token)

    token = ambient.attach(trace.set_span_in_context(trace.NonRecordingSpan(somebody)))
    try:
        with_frontend(traces, monkeypatch, body)
        assert traces.tracer.begin("x", "server", 1).parent is None
    finally:
        ambient.detach(token)
    assert traces.spans.one(f"{SERVICE}/Generate").parent_id == ""
    assert all(int(span.trace_id, 16) != 0xABC for span in traces.spans.all())


async def rest(call: Any) -> None:
    """Reads to the end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def _stop_string(f: Frontend) -> None:
    whole = "".join(
        o.text for m in await collect(f.stub.Generate(generate_request(PROMPT, max_tokens=40))) for o in m.outputs
    )
    await collect(f.stub.Generate(generate_request(PROMPT, max_tokens=40, stop=[whole[8:11]], request_id="end")))


async def _limit(f: Frontend) -> None:
    await collect(f.stub.Generate(generate_request(PROMPT, n=2, seed=2**64 - 1, request_id="end")))


async def _abort(f: Frontend) -> None:
    call = f.stub.Generate(generate_request(PROMPT, max_tokens=900, request_id="end"))
    await call.read()
    await f.stub.Abort(pb.AbortRequest(request_ids=["end"]))
    await rest(call)


async def _cancel(f: Frontend) -> None:
    call = f.stub.Generate(generate_request(PROMPT, max_tokens=900, request_id="end"))
    await call.read()
    call.cancel()


async def _late(f: Frontend) -> None:
    await status_of(f.stub.Generate(generate_request(PROMPT, max_tokens=900, request_id="end"), timeout=0.3))


async def _refused(f: Frontend) -> None:
    await status_of(f.stub.Generate(generate_request(PROMPT, temperature=-1, request_id="end")))


async def _unreadable(f: Frontend) -> None:
    await status_of(f.stub.Generate(pb.GenerateRequest(request_id="end")))


async def _unreadable_chat(f: Frontend) -> None:
    await status_of(f.stub.Chat(pb.ChatRequest(request_id="end")))


async def _too_long(f: Frontend) -> None:
    await status_of(f.stub.Generate(generate_request("hello " * 5000, request_id="end")))


async def _failed(f: Frontend) -> None:
    f.executor.options.failures = {1: InternalError("out of memory")}  # type: ignore[attr-defined]
    await status_of(f.stub.Generate(generate_request(PROMPT, request_id="end")))


async def _refused_when_draining(f: Frontend) -> None:
    f.service._is_draining = True
    await status_of(f.stub.Generate(generate_request(PROMPT, request_id="end")))


PARTS = ["tokenize", "generate"]


@pytest.mark.parametrize(
    ("how", "status", "reasons", "is_error", "children"),
    [
        (_stop_string, "OK", ["stop"], False, PARTS),
        (_limit, "OK", ["length", "length"], False, PARTS),
        (_abort, "OK", ["abort"], False, PARTS),
        (_cancel, "CANCELLED", ["abort"], False, PARTS),
        (_late, "DEADLINE_EXCEEDED", None, True, PARTS),
        (_failed, "INTERNAL", ["error"], True, PARTS),
        (_refused, "INVALID_ARGUMENT", None, False, []),
        (_unreadable, "INVALID_ARGUMENT", None, False, []),
        (_unreadable_chat, "INVALID_ARGUMENT", None, False, []),
        (_too_long, "INVALID_ARGUMENT", None, False, ["tokenize"]),
        (_refused_when_draining, "UNAVAILABLE", None, True, []),
    ],
)
def test_every_end_is_traced(
    traces: Traces,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[Frontend], Awaitable[None]],
    status: str,
    reasons: list[str] | None,
    is_error: bool,
    children: list[str],
) -> None:
    """Case: vllm#32162, vllm#9952"""
    with_frontend(traces, monkeypatch, how, options=FakeOptions(latency_s=0.01))
    spans = traces.spans
    method = "Chat" if how is _unreadable_chat else "Generate"
    server = spans.one(f"{SERVICE}/{method}", gen_ai__response__id="end")
    said = server.attributes
    assert (said["rpc.response.status_code"], server.is_error) == (status, is_error)
    assert said.get("error.type") == (status if is_error else None)
    assert [span.name for span in spans.children(server)] == children
    if children == PARTS:
        assert said["gen_ai.usage.output_tokens"] >= 0 and said["gen_ai.usage.input_tokens"] > 0
        assert reasons is None or said["gen_ai.response.finish_reasons"] == reasons
    if children == ["tokenize"]:
        assert spans.one("tokenize").is_error
    for span in spans.trace(server.trace_id):
        assert server.start_ns <= span.start_ns <= span.end_ns <= server.end_ns
    assert PROMPT not in str([(span.attributes, span.message, span.events) for span in spans.all()])


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE", "FINAL_ONLY"])
@pytest.mark.parametrize("capture", ["", "true"])
def test_text_is_captured_only_where_asked_for(
    traces: Traces, monkeypatch: pytest.MonkeyPatch, kind: str, capture: str
) -> None:
    monkeypatch.setenv(CAPTURE_VARIABLE, capture)
    output_kind = types_pb2.OutputKind.Value(f"OUTPUT_KIND_{kind}")
    texts: dict[int, str] = {}

    async def body(f: Frontend) -> None:
        messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=PROMPT)]
        params = frontend_support.sampling(max_tokens=12, n=2, stop=["never said"])
        request = pb.ChatRequest(messages=messages, sampling_params=params, output_kind=output_kind)
        for message in await collect(f.stub.Chat(request)):
            for output in message.outputs:
                before = texts.get(output.index, "") if kind == "DELTA" else ""
                texts[output.index] = before + output.text

    with_frontend(traces, monkeypatch, body)
    said = traces.spans.one(f"{SERVICE}/Chat").attributes
    assert said["gen_ai.request.stream"] is (kind != "FINAL_ONLY")
    assert ("gen_ai.response.time_to_first_chunk" in said) is (kind != "FINAL_ONLY")
    if not capture:
        assert not {"gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.request.stop_sequences"} & set(said)
        return
    assert json.loads(said["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": PROMPT}]}
    ]
    assert json.loads(said["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": texts[i]}], "finish_reason": "length"}
        for i in range(2)
    ]
    assert said["gen_ai.request.stop_sequences"] == ["never said"]


def test_other_calls_have_no_spans(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(f: Frontend) -> None:
        await f.stub.ListModels(pb.ListModelsRequest())
        await f.stub.Tokenize(pb.TokenizeRequest(text=PROMPT))
        assert (await status_of(f.stub.Embed(pb.EmbedRequest()))).code() is grpc.StatusCode.UNIMPLEMENTED

    with_frontend(traces, monkeypatch, body)
    assert traces.names() == []


def test_requests_at_once_keep_their_traces(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: vllm#14330"""
    parents = {f"r{i}": parent() for i in range(12)}

    async def body(f: Frontend) -> None:
        calls = [
            f.stub.Generate(generate_request(PROMPT, request_id=name), metadata=metadata(above))
            for name, above in parents.items()
        ]
        await asyncio.gather(*(collect(call) for call in calls))

    with_frontend(traces, monkeypatch, body)
    for name, above in parents.items():
        server = traces.spans.one(f"{SERVICE}/Generate", gen_ai__response__id=name)
        assert (server.trace_id, server.parent_id) == ids(above)
        assert [s.name for s in traces.spans.trace(server.trace_id)] == [server.name, "tokenize", "generate"]
