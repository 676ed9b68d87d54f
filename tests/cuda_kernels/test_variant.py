"""The table of resources notices what it is there for."""

from __future__ import annotations

from kernels.cuda.variant import Resources, all_variants, differences, read_table


def test_what_is_above_its_ceiling_is_told() -> None:
    table = {("a", 90): Resources(32, 0, 1024), ("b", 90): Resources(32, 0, 1024)}
    found = {("a", 90): Resources(40, 8, 1024), ("c", 90): Resources(1, 0, 0)}
    assert differences(found, table) == [
        "c sm_90: not in the table",
        "b sm_90: no kernel has it",
        "a sm_90: 40 registers, at most 32",
        "a sm_90: 8 spill_bytes, at most 0",
    ]
    assert differences(table, table) == []


def test_variants_have_names_of_their_own() -> None:
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names)) > 0
    assert {name for name, _ in read_table()} == set(names)
