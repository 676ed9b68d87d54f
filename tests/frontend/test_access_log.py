"""The access log: one line for each request that ended, with lengths and reasons; no log has a prompt or an answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import grpc
import pytest
from frontend_support import CoreOptions, collect, eventually, frontend, generate_request, run, status_of

from core_svc.config import EngineConfig
from core_svc.fake_executor import FakeOptions
from frontend_svc.access_log import AccessLog
from frontend_svc.observer import Observers
from pagewire.runtime.log_fields import ATTRIBUTE, HIDDEN_ATTRIBUTE
from pagewire.runtime.log_format import JsonFormatter, TextFormatter

Files = Mapping[str, bytes]
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


def test_one_line_per_request_and_never_its_text(smollm2_files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = CoreOptions(EngineConfig(log_requests=True), options=FakeOptions(latency_s=0.01))
    answers: list[str] = []

    async def scenario() -> None:
        async with frontend("grpc", smollm2_files, options) as f:
            f.service._observers = Observers([AccessLog()])
            request = generate_request("Xylophone of Zanzibar", request_id="whole", n=2, max_tokens=4)
            messages = await collect(f.stub.Generate(request, metadata=[("traceparent", TRACE)]))
            answers.extend(o.text for m in messages for o in m.outputs if len(o.text) > 3)
            refused = await status_of(f.stub.Generate(generate_request(request_id="x" * 9000)))
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            call = f.stub.Generate(generate_request("Xylophone", request_id="gone", max_tokens=900))
            await call.read()
            call.cancel()
            await eventually(lambda: len(lines_of(caplog)) == 3)

    run(scenario())
    whole, refused, gone = (getattr(record, ATTRIBUTE) for record in lines_of(caplog))
    assert {name: whole[name] for name in whole if not name.endswith("_ms")} == {
        "request_id": "whole",
        "core": "core",
        "operation": "generate",
        "code": "OK",
        "finish_reasons": "LENGTH,LENGTH",
        "prompt_tokens": whole["prompt_tokens"],
        "cached_tokens": 0,
        "completion_tokens": 8,
        "trace_id": "1" * 32,
        "span_id": "2" * 16,
    }
    assert 0 < whole["ttft_ms"] <= whole["duration_ms"]
    assert refused["request_id"] == "x" * 256
    assert refused["code"] == "INVALID_ARGUMENT"
    assert "finish_reasons" not in refused
    assert (gone["code"], gone["abort_reason"]) == ("CANCELLED", "CLIENT")
    steps = [getattr(record, HIDDEN_ATTRIBUTE) for record in caplog.records if record.name == "core_svc.steps"]
    assert {(step["request_id"], step.get("trace_id")) for step in steps} >= {("whole", "1" * 32), ("gone", None)}
    for formatter in (TextFormatter("frontend"), JsonFormatter("frontend")):
        text = "\n".join(formatter.format(record) for record in caplog.records)
        assert "request ended" in text
        assert not any(word in text for word in ["Xylophone", "Zanzibar", *answers])


def lines_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "frontend_svc.requests"]
