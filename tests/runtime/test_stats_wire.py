"""Stats on the wire: every field of every dataclass has a field of its name in the message, and survives."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from pagewire.columns import int32
from pagewire.engine import CoreStats
from pagewire.errors import InvalidArgumentError
from pagewire.runtime.process_stats import process_stats
from pagewire.stats import (
    BlockColumns,
    BlockState,
    CoreConnection,
    CoreDetail,
    FrontendStats,
    ProcessStats,
    RequestColumns,
    RequestState,
    StepColumns,
    WorkerStats,
)
from pagewire.stats_wire import fill, read
from pagewire.types_wire import core_stats_from_proto, core_stats_to_proto
from pagewire.v1 import core_pb2, frontend_pb2, types_pb2, worker_pb2

VALUES: dict[str, Any] = {
    "int": 7,
    "str": "text",
    "bool": True,
    "bytes": b"\x01\x02",
    "list[str]": ["a", "b"],
    "Int32Column": int32([1, -2]),
    "UInt64Column": np.array([1, 2**64 - 1], np.uint64),
    "tuple[CoreConnection, ...]": (CoreConnection("a:1", True, "c", "m", 3, ""), CoreConnection("b:1", error="gone")),
}
NESTED = (ProcessStats, RequestColumns, StepColumns, BlockColumns)


def filled(cls: type[Any]) -> Any:
    """An instance in which no field has its default."""
    values = {**VALUES, **{nested.__name__: nested for nested in NESTED}}
    made = {field.name: values[str(field.type)] for field in fields(cls)}
    return cls(**{name: filled(value) if isinstance(value, type) else value for name, value in made.items()})


def equal(one: Any, other: Any) -> bool:
    if is_dataclass(one):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    return bool(one == other)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (CoreDetail, core_pb2.CoreDetail),
        (FrontendStats, frontend_pb2.GetStatsResponse),
        (WorkerStats, worker_pb2.WorkerServiceUtilityResponse.Stats),
        (ProcessStats, types_pb2.ProcessStats),
    ],
)
def test_every_field_survives(cls, message):
    stats = filled(cls)
    assert {field.name for field in fields(cls)} == set(message.DESCRIPTOR.fields_by_name)
    sent = message.FromString(fill(message(), stats).SerializeToString())
    assert equal(stats, read(cls, sent))
    assert equal(cls(), read(cls, message()))


def test_core_stats_carry_a_detail_only_where_there_is_one():
    assert not core_stats_to_proto(CoreStats(num_running=1)).HasField("detail")
    assert core_stats_from_proto(core_pb2.CoreStats(num_running=1)) == CoreStats(num_running=1)
    stats = CoreStats(num_running=1, detail=filled(CoreDetail))
    found = core_stats_from_proto(core_stats_to_proto(stats))
    assert equal(found.detail, stats.detail)


def test_enums_are_those_of_the_wire():
    for plain, wire, prefix in (
        (RequestState, core_pb2.RequestState, "REQUEST_STATE_"),
        (BlockState, core_pb2.BlockState, "BLOCK_STATE_"),
    ):
        named = {name.removeprefix(prefix): number for name, number in wire.items() if number}
        assert {state.name: state.value for state in plain} == named


def test_a_column_that_is_none_is_refused():
    message = core_pb2.CoreDetail(requests=core_pb2.CoreDetail.RequestColumns(states=b"123"))
    with pytest.raises(InvalidArgumentError, match="states"):
        read(CoreDetail, message)


def test_a_process_knows_itself():
    found = process_stats("life")
    assert found.incarnation == "life" and found.pid and found.resident_bytes > 2**20
    assert 0 < found.uptime_ms < 10 * 3_600_000 and found.cpu_ms > 0
