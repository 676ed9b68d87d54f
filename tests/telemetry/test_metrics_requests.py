"""What the observers count of ends that a script against real processes can't bring about at will."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from core_svc.config import EngineConfig
from core_svc.engine import EngineCore
from core_svc.fake_executor import FakeExecutor, FakeOptions
from core_svc.metrics import EngineMetrics
from core_svc.observer import EngineObserver
from core_svc.state_metrics import StateMetrics, WorkerState
from frontend_svc.input_processor import TextRequest
from frontend_svc.metrics import CoreLinks, RequestMetrics
from frontend_svc.observer import RequestTimeline
from frontend_svc.outputs import OutputKind
from frontend_svc.parallel_sampling import ParentRequest
from pagewire.engine import AbortReason, EngineInfo, EngineRequest, ModelInfo, TraceContext
from pagewire.errors import InternalError, PagewireError, ResourceExhaustedError, UnavailableError
from pagewire.runtime.instruments import Instruments
from pagewire.runtime.metrics import ProcessMetrics
from pagewire.sampling import SamplingParams
from tests.telemetry.metrics_support import SAMPLED, Scrape, parse, value

SECOND = 1_000_000_000
MODEL = ModelInfo("m", "Fake", "float32", "float32", "", "", 100, 100, (2,))


class Told:
    """Instruments of a service, as a scrape shows them."""

    def __init__(self, service: str) -> None:
        self.process = ProcessMetrics(service, "0")

    @property
    def instruments(self) -> Instruments:
        return self.process.instruments

    def scrape(self) -> Scrape:
        return parse(self.process.render("application/openmetrics-text; version=1.0.0")[0].decode())


def ended(error: BaseException | None = None, reason: AbortReason | None = None, *, is_added: bool = True) -> Scrape:
    """A frontend that saw one request of key `alice`, which ended like this after ten seconds."""
    told = Told("frontend")
    metrics = RequestMetrics(told.instruments)
    request = TextRequest([1, 2, 3], trace_context=TraceContext(SAMPLED))
    timeline = RequestTimeline(request, "m", api_key="alice")
    metrics.began(timeline)
    assert value(told.scrape(), "pagewire_frontend_requests_live") == 1
    start = timeline.received_ns
    timeline.tokenize_ns, timeline.tokenized_ns = start, start + SECOND
    timeline.parent = ParentRequest("x", [1, 2, 3], OutputKind.DELTA)
    timeline.added_ns = start + 2 * SECOND if is_added else 0
    timeline.error, timeline.abort_reason, timeline.ended_ns = error, reason, start + 10 * SECOND
    metrics.ended(timeline)
    return told.scrape()


@pytest.mark.parametrize(
    ("error", "reason", "code", "cause"),
    [
        (None, None, "OK", None),
        (None, AbortReason.ABORT_CALL, "OK", "abort_call"),
        (asyncio.CancelledError(), AbortReason.CLIENT, "CANCELLED", "client"),
        (asyncio.CancelledError(), AbortReason.DEADLINE, "DEADLINE_EXCEEDED", "deadline"),
        (ResourceExhaustedError("slow", reason="SLOW_CONSUMER"), None, "RESOURCE_EXHAUSTED", "slow_consumer"),
        (UnavailableError("bye", reason="SHUTDOWN"), None, "UNAVAILABLE", "shutdown"),
        (UnavailableError("gone", reason="CORE_LOST"), None, "UNAVAILABLE", None),
        (RuntimeError("a fault"), None, "INTERNAL", None),
    ],
)
def test_ends_of_requests_that_a_core_had(
    error: BaseException | None, reason: AbortReason | None, code: str, cause: str | None
) -> None:
    scrape = ended(error, reason)
    assert value(scrape, "pagewire_frontend_requests_total", code=code, api_key="alice") == 1
    assert value(scrape, "pagewire_frontend_requests_live") == 0
    aborts = {s.labels["cause"]: s.value for s in scrape["pagewire_frontend_aborts"].samples}
    assert {name for name, count in aborts.items() if count} == ({cause} if cause else set())
    assert not scrape["pagewire_frontend_rejections"].samples
    assert value(scrape, "pagewire_frontend_prompt_tokens_total", model="m", api_key="alice") == 3
    type_of_error = "" if code == "OK" else code
    assert value(scrape, "gen_ai_server_request_duration_seconds_sum", error_type=type_of_error) == 10
    assert value(scrape, "pagewire_frontend_tokenize_duration_seconds_sum") == 1


def test_a_request_that_no_core_took_is_a_rejection_and_nobody_pays() -> None:
    scrape = ended(ResourceExhaustedError("full"), is_added=False)
    labels = {"code": "RESOURCE_EXHAUSTED", "reason": "RESOURCE_EXHAUSTED"}
    assert value(scrape, "pagewire_frontend_rejections_total", **labels) == 1
    assert not scrape["pagewire_frontend_prompt_tokens"].samples
    assert value(scrape, "pagewire_frontend_add_duration_seconds_count") == 0


def test_the_life_of_links_to_cores() -> None:
    told = Told("frontend")
    links, (first, second) = CoreLinks(told.instruments), (object(), object())
    info = EngineInfo("i1", MODEL, 16, 10, 4, 64, 10)
    links.opened(first, "a:1", info)
    links.opened(second, "b:1", replace(info, core_incarnation="i2"))
    links.reopened(first)
    links.lost(first, is_closed=False)
    links.lost(first, is_closed=True)
    links.lost(second, is_closed=True)
    links.opened(second, "b:1", info)
    scrape = told.scrape()
    name = "pagewire_frontend_core_"
    counts = [value(scrape, name + n) for n in ("connections", "connects_total", "losses_total")]
    assert counts == [1, 3, 1] and value(scrape, name + "stream_reconnects_total") == 1
    assert [s.labels["target"] for s in scrape["pagewire_frontend_core"].samples] == ["b:1"]


def engine_of(told: Told, options: FakeOptions | None = None, **config: Any) -> tuple[EngineCore, WorkerState]:
    executor = FakeExecutor(10, block_size=4, options=options)
    observers: list[EngineObserver] = [EngineMetrics(told.instruments)]
    settings = EngineConfig(block_size=4, **config)
    engine = EngineCore(executor, MODEL, executor.cache, settings, lambda *_: None, observers=observers)
    state = WorkerState()
    StateMetrics(told.instruments, state, "w:1", lambda: 2).engine = engine
    return engine, state


def request(number: int, num_tokens: int = 8, max_tokens: int = 12) -> EngineRequest:
    prompt = np.arange(num_tokens, dtype=np.int32) + 10 * number
    return EngineRequest(number, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


def test_failed_steps_and_errors_of_the_core() -> None:
    told = Told("core")
    engine, _ = engine_of(told, FakeOptions(failures={2: InternalError("out of memory")}))
    engine.add("f", [request(1)])
    while engine.has_work():
        engine.step()
    scrape = told.scrape()
    assert value(scrape, "pagewire_core_steps_failed_total") == 1
    assert value(scrape, "pagewire_core_request_errors_total", code="INTERNAL") == 1
    assert value(scrape, "pagewire_core_requests_ended_total", finish_reason="error") == 1


def test_why_requests_wait() -> None:
    told = Told("core")
    engine, state = engine_of(told, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False)
    state.connected("w1")
    engine.add("f", [request(number) for number in (1, 2, 3)])
    assert waiting(told) == {"queued": 3}
    seen: list[dict[str, int]] = []
    while engine.has_work():
        engine.step()
        seen.append(waiting(told))
    assert {"queued": 1} in seen and {"queued": 1, "preempted": 1} in seen and seen[-1] == {}
    scrape = told.scrape()
    lost = value(scrape, "pagewire_core_recomputed_tokens_total")
    assert value(scrape, "pagewire_core_preemptions_total") >= 1 and lost > 0
    assert value(scrape, "pagewire_core_frontends") == 2 and value(scrape, "pagewire_core_worker_up") == 1
    state.lost()
    state.lost()
    scrape = told.scrape()
    assert value(scrape, "pagewire_core_worker_up") == 0 and value(scrape, "pagewire_core_worker_losses_total") == 1
    assert not scrape["pagewire_core_worker"].samples


def waiting(told: Told) -> dict[str, int]:
    samples = told.scrape()["pagewire_core_requests_waiting"].samples
    return {sample.labels["reason"]: int(sample.value) for sample in samples if sample.value}


def test_errors_have_codes_that_are_grpcs() -> None:
    """The labels' values are the names that callers see."""
    classes = PagewireError.__subclasses__()
    assert classes and {cls.code for cls in classes} <= {code.name for code in grpc.StatusCode}
