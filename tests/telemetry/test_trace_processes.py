"""One trace over four processes: a client, a frontend, a core and a worker, through a collector, whatever the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import OtlpReceiver, Received, Spans
from traced_processes import Collector, TracedDeployment, run_client, traced

pytestmark = pytest.mark.system
SERVICE = "pagewire.v1.FrontendService"
CLOCK_NS = 1_000_000
"""Between the clocks of two processes of this machine, with room."""


@pytest.fixture(scope="module")
def calls(
    traced_deployment: TracedDeployment, collector: Collector, receiver: OtlpReceiver
) -> dict[str, dict[str, Any]]:
    """How the calls of trace_client.py ended, once all their spans are there."""
    found = run_client(collector.endpoint, traced_deployment.target, "all")
    del found["pid"]
    for name, call in found.items():
        receiver.spans.one(f"{SERVICE}/Generate", call["trace_id"])
        if name != "refused":
            num_requests = 3 if name == "three" else 1
            receiver.spans.wait(lambda _, c=call, n=num_requests: len(of_core(receiver.spans, c["trace_id"])) == n)
    return found


def of_core(spans: Spans, trace_id: str) -> list[Received]:
    return [span for span in spans.trace(trace_id) if span.name == "engine.request"]


def steps_of(spans: Spans, request: Received) -> list[Received]:
    """The steps that a request's span names, in order, once they are there."""

    def named(_: object) -> list[Received]:
        known = {span.link: span for span in spans.named("engine.step")}
        return [known[link] for link in request.links] if set(request.links) <= set(known) else []

    found: list[Received] = spans.wait(named)
    return found


def test_one_trace_from_client_to_worker(
    traced_deployment: TracedDeployment, collector: Collector, receiver: OtlpReceiver
) -> None:
    """Case: vllm#33272, vllm#9952"""
    said, spans = run_client(collector.endpoint, traced_deployment.target, "one"), receiver.spans
    trace_id = said["one"]["trace_id"]
    request = spans.one("engine.request", trace_id)
    client = spans.one("one", trace_id)
    server = spans.one(f"{SERVICE}/Chat", trace_id)
    tokenize, generate = spans.one("tokenize", trace_id), spans.one("generate", trace_id)
    phases = [spans.one(name, trace_id) for name in ("queue", "prefill", "decode")]

    assert (client.span_id, client.parent_id) == (said["one"]["span_id"], "")
    assert [s.parent_id for s in (server, tokenize, generate, request)] == [
        client.span_id,
        server.span_id,
        server.span_id,
        generate.span_id,
    ]
    assert all(phase.parent_id == request.span_id for phase in phases)
    assert len(spans.trace(trace_id)) == 8, "and nothing else"
    assert [s.kind for s in (server, tokenize, generate, request)] == ["server", "internal", "client", "server"]

    for outer, inner in [(client, server), (server, tokenize), (server, generate), (generate, request)]:
        assert outer.start_ns - CLOCK_NS <= inner.start_ns <= inner.end_ns
    queue, prefill, decode = phases
    assert request.start_ns == queue.start_ns and request.end_ns == decode.end_ns
    assert queue.end_ns == prefill.start_ns and prefill.end_ns == decode.start_ns
    assert request.event("first_token")[0] == decode.start_ns
    assert request.event("finished") == (request.end_ns, {"pagewire.finish_reason": "length"})

    steps = steps_of(spans, request)
    numbers = [step.attributes["pagewire.step"] for step in steps]
    assert request.attributes["pagewire.step.numbers"] == numbers and request.attributes["pagewire.steps"] == 6
    assert (numbers[0], numbers[-1]) == (
        request.attributes["pagewire.step.first"],
        request.attributes["pagewire.step.last"],
    )
    executed = [spans.one("execute", step.trace_id) for step in steps]
    for step, execute in zip(steps, executed, strict=True):
        assert step.parent_id == "" and step.trace_id != trace_id, "a step is a trace of its own"
        assert step.links == [request.link]
        assert (execute.parent_id, execute.kind) == (step.span_id, "server")
        assert execute.attributes["pagewire.worker.rank"] == 0 and execute.attributes["pagewire.execute.clock"] == "cpu"
        parts = [execute.attributes[f"pagewire.execute.{part}_s"] for part in ("prepare", "forward", "sample")]
        assert all(part > 0 for part in parts) and sum(parts) <= (execute.end_ns - execute.start_ns) / 1e9
    assert [s.attributes["pagewire.step.prefill_tokens"] for s in steps] == [4, 0, 0, 0, 0, 0]
    assert [s.attributes["pagewire.step.decode_tokens"] for s in steps] == [0, 1, 1, 1, 1, 1]

    pids = [client.pid, server.pid, request.pid, executed[0].pid]
    assert pids == [said["pid"], *(traced_deployment.pid(name) for name in ("frontend", "core", "worker"))]
    assert len(set(pids)) == 4
    assert [s.service for s in (server, request, executed[0])] == [
        "pagewire-frontend",
        "pagewire-core",
        "pagewire-worker",
    ]
    for service, span in (("frontend", server), ("core", request), ("worker", executed[0])):
        assert span.resource["service.instance.id"] == traced_deployment.ready[service].incarnation


def test_what_the_server_span_says(
    calls: dict[str, dict[str, Any]], receiver: OtlpReceiver, traced_deployment: TracedDeployment
) -> None:
    server = receiver.spans.one(f"{SERVICE}/Generate", calls["three"]["trace_id"])
    host, _, port = traced_deployment.target.rpartition(":")
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": f"{SERVICE}/Generate",
        "rpc.response.status_code": "OK",
        "server.address": host,
        "server.port": int(port),
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pagewire",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 3,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.response.id": "three",
        "gen_ai.response.finish_reasons": ["length"] * 3,
        "gen_ai.usage.output_tokens": 18,
    }
    assert expected.items() <= server.attributes.items()
    assert 0 < server.attributes["gen_ai.response.time_to_first_chunk"] <= (server.end_ns - server.start_ns) / 1e9
    assert "error.type" not in server.attributes and not server.is_error


def test_each_completion_has_its_request_span(calls: dict[str, dict[str, Any]], receiver: OtlpReceiver) -> None:
    """Case: vllm#33272"""
    trace_id = calls["three"]["trace_id"]
    requests = of_core(receiver.spans, trace_id)
    generate = receiver.spans.one("generate", trace_id)
    assert {r.parent_id for r in requests} == {generate.span_id}
    assert sorted(r.attributes["pagewire.completion"] for r in requests) == [0, 1, 2]
    assert all(r.attributes["pagewire.output_tokens"] == 6 for r in requests)
    for request in requests:
        for step in steps_of(receiver.spans, request):
            assert request.link in step.links


def test_two_requests_of_one_batch_share_no_trace(calls: dict[str, dict[str, Any]], receiver: OtlpReceiver) -> None:
    """Case: vllm#38672"""
    first, second = (of_core(receiver.spans, calls[f"pair {x}"]["trace_id"])[0] for x in "ab")
    common = set(first.links) & set(second.links)
    assert common, "they were in one batch"
    for step in steps_of(receiver.spans, first):
        wanted = {first.link} | ({second.link} if step.link in common else set())
        assert set(step.links) == wanted and step.attributes["pagewire.step.traced_requests"] == len(wanted)
        assert step.trace_id not in (first.trace_id, second.trace_id)
    for call in (calls["pair a"], calls["pair b"]):
        wanted = [call_name(calls, call), f"{SERVICE}/Generate", "tokenize", "generate"]
        wanted += ["engine.request", "queue", "prefill", "decode"]
        assert sorted(span.name for span in receiver.spans.trace(call["trace_id"])) == sorted(wanted)


def call_name(calls: dict[str, dict[str, Any]], wanted: dict[str, Any]) -> str:
    return next(name for name, call in calls.items() if call is wanted)


@pytest.mark.parametrize(
    ("name", "status", "abort_reason", "is_error"),
    [
        ("aborted", "OK", "abort_call", False),
        ("left", "CANCELLED", "client", False),
        ("late", "DEADLINE_EXCEEDED", "deadline", True),
    ],
)
def test_ends_before_time_are_traced_with_their_usage(
    calls: dict[str, dict[str, Any]],
    receiver: OtlpReceiver,
    name: str,
    status: str,
    abort_reason: str,
    is_error: bool,
) -> None:
    """Case: vllm#32162"""
    trace_id = calls[name]["trace_id"]
    server = receiver.spans.one(f"{SERVICE}/Generate", trace_id)
    (request,) = of_core(receiver.spans, trace_id)
    said = server.attributes
    assert (said["rpc.response.status_code"], server.is_error) == (status, is_error)
    assert said.get("error.type") == (status if is_error else None)
    assert said["gen_ai.usage.input_tokens"] == 9 and 0 < said["gen_ai.usage.output_tokens"] < 3000
    of_request = request.attributes
    assert of_request["pagewire.prompt_tokens"] == 9 and 0 < of_request["pagewire.output_tokens"] < 3000
    assert of_request["pagewire.finish_reason"] in ("abort", "deadline")
    if of_request["pagewire.finish_reason"] == "abort":
        assert of_request["pagewire.abort_reason"] == abort_reason == said["pagewire.abort_reason"]
    assert [s.name for s in receiver.spans.children(request)] == ["queue", "prefill", "decode"]
    assert request.event("finished")[0] == request.end_ns


def test_a_refused_request_is_traced(calls: dict[str, dict[str, Any]], receiver: OtlpReceiver) -> None:
    """Case: vllm#9952"""
    (server,) = [s for s in receiver.spans.trace(calls["refused"]["trace_id"]) if s.service == "pagewire-frontend"]
    assert server.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT" and not server.is_error
    assert server.attributes["pagewire.refused_fields"] == ["sampling_params.temperature"]


def test_the_command_line_is_a_part_of_the_trace(
    traced_deployment: TracedDeployment, collector: Collector, receiver: OtlpReceiver
) -> None:
    command = [sys.executable, "-m", "pagewire.cli", "generate", "--no-chat", "hello", "--max-tokens", "3"]
    done = subprocess.run(
        [*command, "--server", traced_deployment.target],
        env=traced(collector.endpoint, OTEL_SERVICE_NAME="a terminal"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    client = receiver.spans.wait(
        lambda all_: [s for s in all_ if s.service == "a terminal" and s.name == f"{SERVICE}/Generate"]
    )[0]
    assert (client.kind, client.parent_id) == ("client", "")
    (request,) = receiver.spans.wait(lambda _: of_core(receiver.spans, client.trace_id))
    (server,) = receiver.spans.children(client)
    assert server.kind == "server" and request.trace_id == client.trace_id


def is_documented(name: str, text: str) -> bool:
    """Whether the page has it in backquotes, in full or from one of its dots on."""
    parts = name.split(".")
    return any(f"`{'.' if i else ''}{'.'.join(parts[i:])}`" in text for i in range(len(parts)))


def test_no_text_and_nothing_but_requests_and_steps(
    calls: dict[str, dict[str, Any]], receiver: OtlpReceiver, traced_deployment: TracedDeployment
) -> None:
    """Health and reflection have no spans, and no span has what was said."""
    target = traced_deployment.target
    grpcurl = [os.path.join(os.path.dirname(sys.executable), "grpcurl"), "-plaintext"]
    for arguments in ([target, "list"], [target, "grpc.health.v1.Health/Check"], [target, f"{SERVICE}/ListModels"]):
        done = subprocess.run([*grpcurl, *arguments], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
    run_client(target=target, endpoint=receiver.endpoint, what="one")
    names = {span.name for span in receiver.spans.all() if span.service.startswith("pagewire-")}
    assert names == {
        f"{SERVICE}/Generate",
        f"{SERVICE}/Chat",
        *("tokenize", "generate", "engine.request", "queue", "prefill", "decode", "engine.step", "execute"),
    }
    for span in receiver.spans.all():
        said = [span.attributes, span.message, *(attributes for _, _, attributes in span.events)]
        assert "hello" not in str(said) and "world" not in str(said), span
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
    for span in (span for span in receiver.spans.all() if span.service.startswith("pagewire-")):
        told = {key for _, _, attributes in span.events for key in attributes} | {name for name, _, _ in span.events}
        missing = {name for name in {*span.attributes, *told, *span.resource} if not is_documented(name, page)}
        assert missing - {f"telemetry.sdk.{part}" for part in ("language", "name", "version")} == set(), span.name
        assert span.name in page
    assert not is_documented("pagewire.never", page)
