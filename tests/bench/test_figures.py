"""The benchmark's arithmetic, its pairing of passes, and its tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest

from bench import sections
from bench.alternate import alternate
from bench.bars import BARS, Bar
from bench.clients import count_tokens
from bench.context import Context
from bench.record import Figure, Recorder, merge, read, write
from bench.report import MARKS, TITLES, bar_row, markdown, replace_marked
from bench.statistic import percentile, ratios, summarize
from bench.workloads import STEP_LONG, STEP_SHORT, decode_steps, load

ROOT = Path(__file__).parents[2]
NOW = ("2026-11-30", "a machine", "a command")


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1) == 100
    assert percentile(values, 0) == 1
    assert percentile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 0.5)


def test_ratios_are_taken_pass_by_pass() -> None:
    # Both sides slow down to half in the second pass; the ratio does not notice.
    assert ratios([10.0, 5.0], [5.0, 2.5]) == [2.0, 2.0]
    assert ratios([10.0, 5.0], [5.0]) == [2.0]


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_what_is_no_number_is_no_figure(values: list[float]) -> None:
    with pytest.raises(ValueError, match="nothing to summarize"):
        summarize(values)


def test_sides_take_turns_and_one_that_fails_harms_no_other() -> None:
    order: list[str] = []

    def side(name: str, fails_at: int = -1) -> int:
        order.append(name)
        if order.count(name) == fails_at:
            raise RuntimeError("out of order")
        return order.count(name)

    passes = alternate({"a": lambda: side("a"), "b": lambda: side("b", fails_at=2), "c": lambda: side("c")}, 3, 60)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "c"]
    assert passes.results == {"a": [1, 2, 3], "b": [1], "c": [1, 2, 3]}
    assert passes.errors == {"b": "RuntimeError: out of order"}


def test_each_side_has_a_pass_even_without_time() -> None:
    assert alternate({"a": lambda: 1, "b": lambda: 2}, 5, 0).results == {"a": [1], "b": [2]}


def test_runs_merge_into_one_table(tmp_path: Path) -> None:
    first, second = Recorder(*NOW), Recorder("2026-12-01", *NOW[1:])
    first.add("steps/8/pagewire", "decode step, with a | and a , in its name", "ms", [3.0, 1.0, 2.0])
    first.add("batch/pagewire", "batch", "tok/s", [100.0])
    second.add("batch/pagewire", "batch", "tok/s", [200.0])
    second.fail("batch/vllm", "batch: vLLM", "no\nsuch   file")
    path = tmp_path / "results.csv"
    write(path, merge(read(path), first.figures))
    write(path, merge(read(path), second.figures))
    found = {figure.key: figure for figure in read(path)}
    assert [found["steps/8/pagewire"].median, found["steps/8/pagewire"].low, found["steps/8/pagewire"].high] == [
        2,
        1,
        3,
    ]
    assert (found["batch/pagewire"].median, found["batch/pagewire"].date) == (200, "2026-12-01")
    assert found["batch/vllm"].has_failed and found["batch/vllm"].note == "no such file"
    text = markdown(list(found.values()))
    assert "| decode step, with a \\| and a , in its name | 2.00 | ms | 1.00-3.00 of 3 |" in text
    assert "| batch: vLLM | failed |  | no such file |" in text


def test_the_report_replaces_what_is_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "REPORT.md"
    path.write_text("before\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nafter\n")
    replace_marked(path, "new")
    replace_marked(path, "newer")
    assert path.read_text() == "before\n<!-- bench: begin -->\n\nnewer\n\n<!-- bench: end -->\nafter\n"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="has no"):
        replace_marked(path, "new")


def test_bars_say_whether_they_are_met() -> None:
    at_least, at_most = Bar("k", "speed", 2.0), Bar("k", "time", 2.0, is_at_least=False)

    def row(bar: Bar, value: float) -> list[str]:
        return bar_row(bar, {"k": Figure("k", "n", "x", value, value, value, 1, *NOW)})

    assert [row(at_least, 2.0)[-1], row(at_least, 1.99)[-1]] == ["yes", "no"]
    assert [row(at_most, 2.0)[-1], row(at_most, 2.01)[-1]] == ["yes", "no"]
    assert bar_row(at_least, {})[2:] == ["not measured", "", ""]
    failed = Figure("k", "n", "", 0, 0, 0, 0, *NOW, "it broke")
    assert bar_row(at_most, {"k": failed})[2:] == ["failed", "it broke", "no"]
    assert len({bar.key for bar in BARS}) == len(BARS)


def test_step_workloads_differ_by_decode_steps_alone() -> None:
    short, long = decode_steps(8)
    assert short.prompts == long.prompts and len(short.prompts) == 8
    assert long.num_output_tokens - short.num_output_tokens == 8 * (STEP_LONG - STEP_SHORT)


def test_the_committed_workloads_are_what_the_report_says() -> None:
    assert (len(load("batch").prompts), load("batch").num_output_tokens) == (64, 9062)
    prefix = load("shared_prefix")
    assert len({tuple(prompt[:512]) for prompt in prefix.prompts}) == 1 and len(prefix.prompts) == 32
    assert all(len(window) == 448 for window in load("perplexity").prompts)


def test_tokens_of_a_message_are_counted_without_parsing_it() -> None:
    head = b'data: {"id":"a","choices":[{"index":0,"text":"x, y","token_ids":'
    assert count_tokens(head + b"[11, 12,13]}]}") == 3
    assert count_tokens(head + b"[7]}]}") == 1
    assert count_tokens(head + b"[]}]}") == 0
    assert count_tokens(b'data: {"usage":{}}') == 0


def test_the_frontend_bars_are_about_the_frontends_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare server is a floor to compare with, not text work."""
    rows = [
        ("with the gRPC write, 64 streams", 66.0),
        ("a bare grpc.aio server, 64 streams", 54.0),
        ("text alone, no stop strings", 4.0),
        ("text alone, two stop strings", 5.0),
        ("text alone, two stop strings, with message", 7.0),
    ]
    figures = [{"name": f"frontend, CPU per token, {name}", "unit": "us", "values": [value]} for name, value in rows]
    monkeypatch.setattr(sections, "_script", lambda *args: figures)
    context = SimpleNamespace(recorder=Recorder(*NOW))
    sections.frontend(cast(Context, context))
    found = {figure.key: figure.median for figure in context.recorder.figures}
    assert found["frontend/cpu"] == 66.0 and found["frontend/detokenize"] == 5.0


def test_what_is_committed_is_what_was_recorded() -> None:
    """Tables with a section for every recorded one, and a picture that is whole."""
    figures = read(ROOT / "bench" / "results.csv")
    assert {figure.section for figure in figures} <= TITLES.keys()
    assert f"{MARKS[0]}\n\n{markdown(figures)}\n\n{MARKS[1]}" in (ROOT / "BENCHMARKS.md").read_text()
    picture = ElementTree.parse(ROOT / "bench" / "ratios.svg")
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    by_key = {figure.key: figure for figure in figures}
    shown = [bar for bar in BARS if bar.is_at_least and not bar.key.startswith("tracing/") and bar.key in by_key]
    for bar in shown:
        if not by_key[bar.key].has_failed:
            assert {bar.what, f"{by_key[bar.key].median:.2f} ×"} <= texts
