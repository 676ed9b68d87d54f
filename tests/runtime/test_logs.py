"""Logs: one format for our lines, warnings and uncaught exceptions; fields, levels by logger, and no line is forged."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pagewire.runtime.log_fields import fields, json_fields, trace_ids
from pagewire.runtime.log_format import JsonFormatter, TextFormatter
from pagewire.runtime.log_levels import apply_levels, parse_levels
from pagewire.runtime.logs import is_read_by_machines, setup_logging
from pagewire.runtime.settings import CommonSettings, parse_settings

FORGED = "a\nERROR core[1] x: forged\r\x1b[31m\u2028"


def record(message: object, *arguments: object, **more: object) -> logging.LogRecord:
    """A record as a logger makes it."""
    extra = more.pop("extra", None)
    exc_info = more.pop("exc_info", None)
    return logging.getLogger("core_svc.engine").makeRecord(
        "core_svc.engine", logging.WARNING, "file.py", 1, message, arguments, exc_info, extra=extra
    )


def caught() -> tuple[object, ...]:
    try:
        raise ValueError(FORGED)
    except ValueError:
        return sys.exc_info()


def test_text_puts_fields_at_the_end_and_leaves_out_those_for_json():
    given = fields(request_id="req-1", step=3, share=0.5, reason="two words", none=None, empty="")
    line = TextFormatter("core").format(record("it %s", "failed", extra={**given, **json_fields(a=1)}))
    head = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING core\[\d+\] core_svc\.engine: it failed "
    assert re.fullmatch(head + r'request_id=req-1 step=3 share=0\.5 reason="two words"', line), line


def test_json_has_the_stable_fields():
    formatter = JsonFormatter("core")
    formatter.incarnation = "abc"
    trace = trace_ids("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    extra = {**fields(request_id="req-1", service="not mine", **trace), **json_fields(step=3)}
    line = json.loads(formatter.format(record("it %s", "failed", extra=extra)))
    assert list(line) == [
        *("time", "level", "service", "pid", "incarnation", "logger", "message"),
        *("request_id", "trace_id", "span_id", "step"),
    ]
    assert (line["level"], line["service"], line["pid"]) == ("warning", "core", os.getpid())
    assert (line["trace_id"], line["span_id"], line["step"]) == ("a" * 32, "b" * 16, 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert abs(datetime.fromisoformat(line["time"]) - datetime.now(UTC)) < timedelta(seconds=10)


@pytest.mark.parametrize("text", ["", None, "garbage", "00-" + "g" * 32 + "-" + "b" * 16 + "-01"])
def test_no_trace_ids_out_of_what_is_no_trace(text):
    assert trace_ids(text) == {}


def test_nothing_that_a_caller_gives_makes_a_line():
    """Case of log injection: newlines and escape sequences in ids, messages and exceptions."""
    forged = record("id %s", FORGED, extra=fields(request_id=FORGED), exc_info=caught())
    text = TextFormatter("core").format(forged)
    first, *others = text.split("\n")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028]", text)
    assert first.count("\\n") >= 2
    # A traceback's lines are indented: none begins as a line of the log does.
    assert others
    assert all(line.startswith("    ") for line in others)
    (line,) = JsonFormatter("core").format(forged).splitlines()
    assert line.isascii()
    read = json.loads(line)
    assert read["request_id"] == FORGED
    assert read["error"]["type"] == "ValueError"
    assert read["error"]["message"] == FORGED
    assert "Traceback" in read["error"]["stack"]


def test_json_of_what_json_does_not_have():
    line = json.loads(JsonFormatter("core").format(record("x %d", "y", extra=fields(a=float("nan"), b="\ud800"))))
    assert line["message"].startswith("x %d (its arguments don't fit")
    assert (line["a"], line["b"]) == ("nan", "\\ud800")


def test_lines_are_bounded():
    line = JsonFormatter("core").format(record("x" * 10**6))
    assert len(line) < 20_000
    assert "characters more)" in line
    assert len(TextFormatter("core").format(record("x" * 10**6))) < 20_000


def test_levels_are_read():
    loggers = parse_levels("info,core_svc.steps=debug, grpc = ERROR").loggers
    assert loggers == {"core_svc.steps": "debug", "grpc": "error"}
    assert parse_levels("core_svc=debug").default == "info"
    assert parse_levels("Warning").default == "warning"


@pytest.mark.parametrize(
    "value", ["loud", "", "info,", "info,debug", "a=info,a=info", "a b=info", "=info", "info,core="]
)
def test_bad_levels_are_refused_by_flag_and_value(value, capsys):
    if value:
        with pytest.raises(SystemExit):
            parse_settings(CommonSettings, "core", [f"--log-level={value}"], environ={})
        message = capsys.readouterr().err
        assert "--log-level" in message
        assert value in message
        assert "debug, info, warning, error" in message
    else:
        with pytest.raises(ValueError, match="must be one of"):
            parse_levels(value)


@pytest.fixture
def restored() -> Iterator[None]:
    """Loggers and hooks as they were."""
    root, level = logging.getLogger(), logging.getLogger().level
    yield
    apply_levels(parse_levels("info"))
    root.setLevel(level)


@pytest.mark.usefixtures("restored")
def test_levels_of_single_loggers_are_set_and_taken_back():
    apply_levels(parse_levels("error,pagewire.some=debug"))
    assert logging.getLogger("pagewire.some.more").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("pagewire.other").isEnabledFor(logging.WARNING)
    apply_levels(parse_levels("debug"))
    assert logging.getLogger("pagewire.some").level == logging.NOTSET
    assert not logging.getLogger("numba.core").isEnabledFor(logging.DEBUG)
    apply_levels(parse_levels("debug,numba=debug"))
    assert logging.getLogger("numba.core").isEnabledFor(logging.DEBUG)


def test_a_format_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'xml': must be one of auto, text, json"):
        setup_logging("core", log_format="xml")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_auto_is_json_in_a_container_that_has_no_terminal(tmp_path):
    mark = tmp_path / "mark"
    absent, present = (str(mark),), (str(tmp_path),)
    assert not is_read_by_machines(io.StringIO(), {}, absent)
    assert is_read_by_machines(io.StringIO(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, absent)
    assert is_read_by_machines(io.StringIO(), {}, present)
    assert not is_read_by_machines(Terminal(), {"container": "podman"}, present)


_EVERYTHING = """
import asyncio, gc, logging, sys, threading, warnings
from pagewire.runtime.logs import set_incarnation, setup_logging
setup_logging("worker", "info", sys.argv[1])
set_incarnation("f00")
logging.getLogger("grpc._common").error("of gRPC")
warnings.warn("old", DeprecationWarning)
def die(what):
    raise RuntimeError(what)
thread = threading.Thread(target=die, args=("in a thread",), name="engine")
thread.start()
thread.join()
async def main():
    task = asyncio.ensure_future(asyncio.sleep(0))
    asyncio.get_running_loop().call_soon(die, "in a callback")
    await task
    await asyncio.sleep(0)
asyncio.run(main())
class Last:
    def __del__(self):
        die("in a finalizer")
Last()
die("at the end")
"""


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_whatever_a_process_says_is_a_line_of_its_log(log_format):
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", _EVERYTHING, log_format], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert done.stdout == ""
    if log_format == "text":
        lines = [line for line in done.stderr.splitlines() if not line.startswith("    ")]
        assert all(re.match(r"\d{4}-\d\d-\d\d \S+ [A-Z]+ worker\[\d+\] ", line) for line in lines), done.stderr
        assert len(lines) == 6
        return
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["incarnation"] for line in lines} == {"f00"}
    found = [(line["logger"], line["level"], line.get("error", {}).get("message")) for line in lines]
    assert found == [
        ("grpc._common", "error", None),
        ("py.warnings", "warning", None),
        ("pagewire.uncaught", "critical", "in a thread"),
        ("asyncio", "error", "in a callback"),
        ("pagewire.uncaught", "error", "in a finalizer"),
        ("pagewire.uncaught", "critical", "at the end"),
    ]
    assert (lines[1]["message"], lines[1]["category"]) == ("old", "DeprecationWarning")
    assert lines[2]["thread"] == "engine"
    assert lines[5]["error"]["type"] == "RuntimeError"
