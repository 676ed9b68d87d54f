"""A scripted run against three real processes: every count is exact, on each of the services that sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc
import pytest

from tests.telemetry.conftest import BLOCK_SIZE, BLOCKS
from tests.telemetry.metrics_support import (
    SAMPLED,
    SERVICES,
    TRACE_ID,
    Background,
    Measured,
    Scrape,
    eventually,
    failed,
    fetch,
    finish,
    parse,
    value,
)

pytestmark = pytest.mark.system

PROMPT = list(range(100, 140))


@dataclass
class Run:
    """The services' numbers after the script."""

    frontend: Scrape
    core: Scrape
    worker: Scrape
    num_prompt_tokens: int
    num_completion_tokens: int


def script(at: Measured) -> tuple[int, int]:
    """What happens; returns the prompt and completion tokens that callers were told of, or that are known else."""
    usages = []
    for calls in (
        # The second finds 2 of the 3 blocks of its prompt in the cache: at least one token is computed.
        [at.generate(PROMPT, max_tokens=8, trace=SAMPLED)],
        [at.generate(PROMPT, max_tokens=8)],
        [at.generate(range(140, 150), max_tokens=4, n=3, temperature=1.0, seed=5)],
        [at.chat("w3 w4", max_tokens=3, ignore_eos=True, temperature=0)],
        # 24 blocks for two that have 11 each and need 14: the later one is preempted once, and ends after the other.
        [at.generate(range(150, 326), max_tokens=40), at.generate(range(200, 376), max_tokens=40)],
    ):
        usages += [finish(call)[-1].usage for call in calls]
    # Ends by a stop string, which the frontend finds: for the core an abort.
    text = finish(at.generate(PROMPT, max_tokens=8))
    said = "".join(output.text for message in text for output in message.outputs)
    usages.append(text[-1].usage)
    usages.append(finish(at.generate(PROMPT, max_tokens=100, stop=[said[2:6]]))[-1].usage)
    assert failed(at.generate(PROMPT, model="another")) is grpc.StatusCode.NOT_FOUND
    assert failed(at.generate(PROMPT, top_p=7.0)) is grpc.StatusCode.INVALID_ARGUMENT
    assert failed(at.generate(PROMPT, max_tokens=8, top_k=-7)) is grpc.StatusCode.INVALID_ARGUMENT
    # Somebody calls Abort after the first token.
    call = at.generate(range(190, 200), max_tokens=300, request_id="to-abort")
    next(call)
    at.stub.Abort(_abort("to-abort"), timeout=30)
    usages.append(finish(call)[-1].usage)
    return sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)


def _abort(request_id: str) -> object:
    from pagewire.v1 import frontend_pb2

    return frontend_pb2.AbortRequest(request_ids=[request_id])


@pytest.fixture(scope="module")
def run(measured: Measured) -> Run:
    before = value(measured.scrape("core"), "pagewire_core_requests_added_total")
    assert before == 0, "these counts are for a deployment that nobody used before"
    tokens = script(measured)
    eventually(measured.is_idle, what="idleness")
    return Run(*(measured.scrape(service) for service in SERVICES), *tokens)


OK, ABORTED, REFUSED = 8, 1, 3
"""Requests of the script that ended well (with a stop string too), by an Abort (no error either), and not at all."""
NUM_CORE = OK + 2 + ABORTED
"""What the core saw of them: one had n = 3."""


def test_requests_and_tokens_on_the_frontend(run: Run) -> None:
    name = "gen_ai_server_request_duration_seconds_count"
    assert value(run.frontend, name, error_type="") == OK + ABORTED
    assert value(run.frontend, name, gen_ai_operation_name="chat") == 1
    assert value(run.frontend, name, error_type="INVALID_ARGUMENT") == 2
    assert value(run.frontend, "gen_ai_server_time_to_first_token_seconds_count") == OK + ABORTED
    assert value(run.frontend, "gen_ai_server_time_per_output_token_seconds_count") >= OK
    assert value(run.frontend, "pagewire_frontend_requests_total", code="OK") == OK + ABORTED
    assert value(run.frontend, "pagewire_frontend_prompt_tokens_total", api_key="") == run.num_prompt_tokens
    assert value(run.frontend, "pagewire_frontend_completion_tokens_total") == run.num_completion_tokens
    assert value(run.frontend, "pagewire_frontend_requests_live") == 0
    assert value(run.frontend, "pagewire_frontend_tokenize_duration_seconds_count") == OK + ABORTED
    assert value(run.frontend, "pagewire_frontend_add_duration_seconds_count") == OK + ABORTED


def test_how_requests_ended(run: Run) -> None:
    ends = "pagewire_frontend_completions_total"
    assert value(run.frontend, ends, finish_reason="length") == OK - 1 + 2
    assert value(run.frontend, ends, finish_reason="stop") == 1
    assert value(run.frontend, ends, finish_reason="abort") == 1
    assert value(run.frontend, "pagewire_frontend_aborts_total", cause="abort_call") == 1
    assert value(run.frontend, "pagewire_frontend_aborts_total") == 1
    rejections = "pagewire_frontend_rejections_total"
    assert value(run.frontend, rejections, code="NOT_FOUND", reason="NOT_FOUND") == 1
    assert value(run.frontend, rejections, code="INVALID_ARGUMENT") == 2
    assert value(run.frontend, rejections) == REFUSED
    core = "pagewire_core_requests_ended_total"
    assert value(run.core, "pagewire_core_requests_added_total") == value(run.core, core) == NUM_CORE
    assert value(run.core, core, finish_reason="length") == OK - 1 + 2
    assert value(run.core, core, finish_reason="abort") == 2
    assert value(run.core, "pagewire_core_aborts_total", cause="stop_string") == 1
    assert value(run.core, "pagewire_core_aborts_total", cause="abort_call") == 1
    assert value(run.core, "pagewire_core_request_queue_duration_seconds_count") == NUM_CORE
    assert value(run.core, "pagewire_core_request_prefill_duration_seconds_count") == NUM_CORE


def test_calls_by_method_and_code(run: Run) -> None:
    calls, method = "rpc_server_call_duration_seconds_count", "pagewire.v1.FrontendService/Generate"
    # One of them was a chat.
    assert value(run.frontend, calls, rpc_method=method, rpc_response_status_code="OK") == OK + ABORTED - 1
    assert value(run.frontend, calls, rpc_method=method, rpc_response_status_code="NOT_FOUND") == 1
    assert value(run.frontend, calls, rpc_method=method, rpc_response_status_code="INVALID_ARGUMENT") == 2
    assert value(run.frontend, calls, rpc_method="pagewire.v1.FrontendService/Chat") == 1
    assert value(run.frontend, "pagewire_rpc_server_errors_total", code="NOT_FOUND", reason="NOT_FOUND") == 1
    # One Add per request, on both ends of the hop, and as many bytes sent as received.
    add = "pagewire.v1.EngineCoreService/Add"
    assert value(run.core, calls, rpc_method=add) == OK + ABORTED
    assert value(run.frontend, "rpc_client_call_duration_seconds_count", rpc_method=add) == OK + ABORTED
    sent = value(run.frontend, "pagewire_rpc_client_bytes_total", rpc_method=add, direction="sent")
    assert sent == value(run.core, "pagewire_rpc_server_bytes_total", rpc_method=add, direction="received") > 0


def test_steps_and_their_messages(run: Run) -> None:
    steps = value(run.core, "pagewire_core_steps_total")
    assert value(run.core, "pagewire_core_step_duration_seconds_count", phase="execute") == steps
    assert value(run.core, "pagewire_core_step_batch_size_count") == steps
    assert value(run.worker, "pagewire_worker_steps_total") == steps
    assert value(run.worker, "pagewire_worker_step_duration_seconds_count", phase="forward") == steps
    scheduled = value(run.core, "pagewire_core_scheduled_tokens_total")
    assert value(run.core, "pagewire_core_step_scheduled_tokens_sum") == scheduled
    assert value(run.core, "pagewire_core_budget_tokens_total") == steps * 2048
    execute = "pagewire.v1.WorkerService/Execute"
    for ours, theirs in (("sent", "received"), ("received", "sent")):
        client = {"rpc_method": execute, "direction": ours}
        server = {"rpc_method": execute, "direction": theirs}
        num_bytes = value(run.core, "pagewire_rpc_client_bytes_total", **client)
        assert num_bytes == value(run.worker, "pagewire_rpc_server_bytes_total", **server) > 40 * steps
        messages = value(run.core, "pagewire_rpc_client_messages_total", **client)
        # The first one of each side is no plan and no result; a slow worker sends heartbeats too.
        assert messages == steps + 1 if ours == "sent" else messages > steps


def test_prefix_cache_preemption_and_recomputed_tokens(run: Run) -> None:
    queries = value(run.core, "pagewire_core_prefix_cache_queries_tokens_total")
    hits = value(run.core, "pagewire_core_prefix_cache_hits_tokens_total")
    # n = 3 looks its prompt up three times.
    assert queries == run.num_prompt_tokens + 2 * 10
    # Three requests came after the first of the same 40 tokens: 2 blocks each, unless the preemption took them.
    assert hits in (2 * BLOCK_SIZE, 4 * BLOCK_SIZE, 6 * BLOCK_SIZE)
    assert value(run.frontend, "pagewire_frontend_cached_tokens_total") == hits
    assert value(run.core, "pagewire_core_preemptions_total") == 1
    recomputed = value(run.core, "pagewire_core_recomputed_tokens_total")
    generated = value(run.core, "pagewire_core_generated_tokens_total")
    scheduled = value(run.core, "pagewire_core_scheduled_tokens_total")
    # Every token was computed once, but for each request's last one and what the cache gave, and some were again. An
    # ended request may be in one step more, which was planned before its end was known.
    least = run.num_prompt_tokens + 2 * 10 - hits + generated - NUM_CORE + recomputed
    assert 0 < recomputed < 256 and least <= scheduled <= least + 2 * NUM_CORE
    assert value(run.core, "pagewire_core_kv_blocks") == BLOCKS
    assert value(run.core, "pagewire_core_kv_blocks_used") == 0


def test_links_and_identities(run: Run) -> None:
    assert value(run.frontend, "pagewire_frontend_core_connections") == 1
    assert value(run.frontend, "pagewire_frontend_core_connects_total") == 1
    assert value(run.frontend, "pagewire_frontend_core_losses_total") == 0
    assert value(run.core, "pagewire_core_frontends") == value(run.core, "pagewire_core_worker_up") == 1
    assert value(run.core, "pagewire_core_worker_connects_total") == 1
    assert value(run.worker, "pagewire_worker_core_connected") == 1
    assert value(run.worker, "pagewire_worker_epoch") == value(run.core, "pagewire_core_epoch") == 1
    (core,) = run.core["pagewire_incarnation"].samples
    (seen,) = run.frontend["pagewire_frontend_core"].samples
    assert seen.labels["incarnation"] == core.labels["incarnation"] and seen.labels["model"]
    (worker,) = run.worker["pagewire_incarnation"].samples
    (known,) = run.core["pagewire_core_worker"].samples
    assert known.labels["incarnation"] == worker.labels["incarnation"]
    assert value(run.worker, "pagewire_worker_kv_pool_bytes") > 0 < value(run.worker, "pagewire_worker_weights_bytes")
    for scrape in (run.frontend, run.core, run.worker):
        assert value(scrape, "pagewire_ready") == value(scrape, "pagewire_build_info") == 1
        assert value(scrape, "process_resident_memory_bytes") > 2**20


def test_exemplars_of_a_sampled_request(run: Run) -> None:
    """In OpenMetrics only, on both services that the request went through, and of no other request."""
    for scrape, name in (
        (run.frontend, "gen_ai_server_time_to_first_token_seconds"),
        (run.core, "pagewire_core_request_queue_duration_seconds"),
    ):
        exemplars = [sample.exemplar for sample in scrape[name].samples if sample.exemplar is not None]
        assert [exemplar.labels["trace_id"] for exemplar in exemplars] == [TRACE_ID]
        assert exemplars[0].value > 0 and abs(float(exemplars[0].timestamp) - time.time()) < 300


def test_the_formats(measured: Measured) -> None:
    text, content_type = fetch(measured.ports["core"], "text/plain")
    assert content_type.startswith("text/plain; version=0.0.4") and "trace_id" not in text and "# EOF" not in text
    text, content_type = fetch(measured.ports["core"])
    assert content_type.startswith("application/openmetrics-text") and text.endswith("# EOF\n")


def test_callers_that_go_away_and_deadlines(measured: Measured, run: Run) -> None:
    before = measured.scrape("frontend"), measured.scrape("core")
    call = measured.generate(range(200, 210), max_tokens=300)
    next(call)
    call.cancel()
    assert failed(measured.generate(range(210, 220), max_tokens=330, timeout_s=0.5)) is (
        grpc.StatusCode.DEADLINE_EXCEEDED
    )
    eventually(measured.is_idle, what="idleness")
    after = measured.scrape("frontend"), measured.scrape("core")

    def rise(place: int, name: str, **labels: str) -> float:
        return value(after[place], name, **labels) - value(before[place], name, **labels)

    assert rise(0, "pagewire_frontend_aborts_total", cause="client") >= 1
    # Whichever notices the deadline first, the caller's gRPC, the frontend or the core, each request ends once.
    ended = "pagewire_core_requests_ended_total"
    assert rise(1, ended) == 2 == rise(1, ended, finish_reason="abort") + rise(1, ended, finish_reason="deadline")
    assert rise(0, "pagewire_frontend_requests_total") == 2


def test_scrapes_while_tokens_run_are_whole(measured: Measured) -> None:
    """Cumulative buckets and counts fit whenever one looks: the strict parser checks each scrape."""
    with Background(lambda: measured.generate(range(220, 230), max_tokens=40)):
        for _ in range(8):
            for service in SERVICES:
                assert len(parse(fetch(measured.ports[service])[0])) > 15
    eventually(measured.is_idle, what="idleness")
