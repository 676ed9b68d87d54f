"""Live requests and what they owe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from pagewire.stats import CoreDetail, RequestState
from pagewire.top.format import (
    Glyphs,
    count,
    duration,
)
from pagewire.top.table import Column, rule, table

STATE_STYLES = {"running": "green", "waiting": "yellow", "preempted": "red"}


@dataclass(frozen=True, slots=True)
class _Request:
    """One row of RequestColumns."""

    name: str
    state: str
    age_ms: int
    priority: int
    num_prompt: int
    num_output: int
    num_drafts: int
    num_placeholders: int
    num_computed: int
    debt: int
    max_output: int
    num_blocks: int
    num_cached: int
    num_preemptions: int


_REQUESTS = [
    Column[_Request]("REQUEST", 14, lambda r: r.name, is_left=True, keeps_end=True, max_width=34),
    Column[_Request]("STATE", 9, lambda r: r.state, is_left=True, style=lambda r: STATE_STYLES.get(r.state, "")),
    Column[_Request]("AGE", 5, lambda r: duration(r.age_ms)),
    Column[_Request]("PRIO", 4, lambda r: str(r.priority)),
    Column[_Request]("PROMPT", 6, lambda r: count(r.num_prompt)),
    Column[_Request]("OUTPUT", 6, lambda r: count(r.num_output)),
    Column[_Request]("OF MAX", 6, lambda r: count(r.max_output), rank=1),
    Column[_Request]("DRAFTS", 6, lambda r: count(r.num_drafts), rank=2),
    Column[_Request]("PLACED", 6, lambda r: count(r.num_placeholders), rank=2),
    Column[_Request]("COMPUTED", 8, lambda r: count(r.num_computed)),
    Column[_Request]("DEBT", 6, lambda r: count(r.debt), style=lambda r: "bold"),
    Column[_Request]("BLOCKS", 6, lambda r: count(r.num_blocks)),
    Column[_Request]("CACHED", 6, lambda r: count(r.num_cached), rank=3),
    Column[_Request]("PREEMPTED", 9, lambda r: count(r.num_preemptions), rank=4),
]


def requests(detail: CoreDetail, num_rows: int | None, width: int, glyphs: Glyphs) -> list[Text]:
    """Live requests in the order in which they are served. debt = prompt + output + drafts + placed - computed."""
    columns = detail.requests
    debts = columns.debts.tolist()
    siblings = {name for name, number in Counter(columns.external_request_ids).items() if number > 1}
    rows = [
        _Request(
            name=_name(name, int(columns.request_ids[i]), int(columns.child_indices[i]), siblings),
            state=RequestState(int(columns.states[i])).name.lower(),
            age_ms=int(columns.ages_ms[i]),
            priority=int(columns.priorities[i]),
            num_prompt=int(columns.num_prompt_tokens[i]),
            num_output=int(columns.num_output_tokens[i]),
            num_drafts=int(columns.num_draft_tokens[i]),
            num_placeholders=int(columns.num_placeholder_tokens[i]),
            num_computed=int(columns.num_computed_tokens[i]),
            debt=debts[i],
            max_output=int(columns.max_num_tokens[i] - columns.num_prompt_tokens[i]),
            num_blocks=int(columns.num_blocks[i]),
            num_cached=int(columns.num_cached_tokens[i]),
            num_preemptions=int(columns.num_preemptions[i]),
        )
        for i, name in enumerate(columns.external_request_ids)
    ]
    shown = rows[:num_rows]
    return [_requests_rule(detail, rows, len(shown), width, glyphs), *table(_REQUESTS, shown, width, glyphs)]


def _name(external_id: str, request_id: int, child_index: int, siblings: set[str]) -> str:
    """As the caller calls it, with the number of the completion where there are several."""
    if not external_id:
        return f"#{request_id}"
    return f"{external_id}/{child_index}" if external_id in siblings else external_id


def _requests_rule(detail: CoreDetail, rows: Sequence[_Request], num_shown: int, width: int, glyphs: Glyphs) -> Text:
    num_total = detail.requests.num_total
    parts: list[tuple[str, str]] = []
    is_whole = len(rows) == num_total
    if is_whole:
        numbers = Counter(row.state for row in rows)
        for state, style in STATE_STYLES.items():
            if numbers[state]:
                parts += [(", " if parts else " ", ""), (f"{numbers[state]} {state}", style)]
    if not parts:
        parts.append((f" {num_total or 'none'}", ""))
    if num_shown < num_total:
        parts.append((f", {num_shown} shown", ""))
    if rows:
        whose = "they owe" if is_whole else f"the first {len(rows)} owe"
        parts.append((f", {whose} {count(sum(row.debt for row in rows))} tokens", ""))
    if detail.snapshot_age_ms:
        parts.append((f", {duration(detail.snapshot_age_ms)} ago", "yellow"))
    return rule("requests", width, glyphs, *parts)
