"""The table of resources notices what it is there for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import kernels.cuda
from kernels.cuda import attention_rows, variant
from kernels.cuda.variant import Resources, all_variants, changed, differences, every_key, read_table, sample


def test_what_is_above_its_ceiling_is_told() -> None:
    table = {("a", 90): Resources(32, 0, 1024), ("b", 90): Resources(32, 0, 1024)}
    found = {("a", 90): Resources(40, 8, 1024), ("c", 90): Resources(1, 0, 0)}
    assert differences(found, table) == [
        "c sm_90: not in the table",
        "a sm_90: 40 registers, at most 32",
        "a sm_90: 8 spill_bytes, at most 0",
    ]
    assert differences(table, table) == []


def test_variants_have_names_of_their_own() -> None:
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names)) > 0
    assert read_table().keys() == every_key()


def test_what_a_compilation_is_made_of_changes_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(found for found in all_variants() if found.name == "paged_attention bf16 128 decode")
    others = [
        dataclasses.replace(one, num_warps=8),
        dataclasses.replace(one, constants={**one.constants, "KEYS": 32}),
        dataclasses.replace(one, types={**one.types, "scale": "fp64"}),
        dataclasses.replace(one, aligned=frozenset()),
    ]
    assert len({each.source() for each in (one, *others)}) == 5
    before = one.source()
    assert before == dataclasses.replace(one, name="another").source()
    # Of a function that the kernel calls, and of a number that this one reads.
    monkeypatch.setattr(attention_rows, "LOG2_E", 1.5)
    assert one.source() != before


def test_what_changed_is_compiled_and_one_of_every_kernel_always() -> None:
    table = {key: Resources(1, 1, 1, source=found.source()) for found in all_variants() for key in keys(found)}
    assert changed(table) == set()
    other = dict(list(table.items())[1:]) | {("silu_and_mul bf16", 80): Resources(1, 1, 1, source="another")}
    assert changed(other) == {next(iter(table)), ("silu_and_mul bf16", 80)}
    kinds = {found.kernel.fn for found in all_variants()}
    assert len(sample()) == len(kinds) and sample() <= every_key()


def keys(found: variant.Variant) -> list[variant.Key]:
    return [(found.name, capability) for capability in found.capabilities]


def test_attention_in_16_bits_spills_nothing_on_hopper() -> None:
    """At head sizes 64 and 128; the README names whatever spills anywhere."""
    spilling = {key: row.spill_bytes for key, row in read_table().items() if row.spill_bytes}
    assert not [key for key in spilling if key[1] == 90 and key[0].startswith("paged_attention bf16")]
    text = (Path(kernels.cuda.__file__).parents[1] / "README.md").read_text()
    assert [f"{name}: {spilled}" for (name, _), spilled in spilling.items() if f"`{name}`" not in text] == []
