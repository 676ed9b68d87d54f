"""What a kernel is compiled for, and what a compilation costs: checked for every kernel without a GPU.

python -m kernels.cuda.variant              compiles all variants and compares them with resources.csv
python -m kernels.cuda.variant --changed    those whose source is not the one in resources.csv, and one of every kernel
python -m kernels.cuda.variant --write      compiles what changed and writes resources.csv
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS = ("fp32", "bf16", "fp16")
"""Names of types as signatures have them."""
CAPABILITIES = (80, 90, 100)
TABLE = Path(__file__).parent / "resources.csv"
_HEADER = ("variant", "capability", "registers", "spill_bytes", "shared_bytes", "source")
_FIGURES = _HEADER[2:5]
_CHECKED_CAPABILITY = 90
"""Of what is compiled where nothing changed."""
_ALIGNED = ["tt.divisibility", 16]


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel: types of its arguments ("*bf16" is a pointer, "i32"), and its constants."""

    name: str
    """Unique among all kernels: the operation, then what tells the variant apart."""
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: frozenset[str] = field(default_factory=frozenset)
    """Integers that are multiples of 16; pointers always are."""
    capabilities: tuple[int, ...] = CAPABILITIES
    fp_fusion: bool = True
    """Whether a product and a sum may be rounded once; as it is launched."""

    def compile(self, capability: int) -> Resources:
        """Compiles to machine code for a compute capability such as 90; needs no GPU."""
        names = self.kernel.arg_names
        signature = {name: "constexpr" if name in self.constants else self.types[name] for name in names}
        is_aligned = {n for n in names if signature[n].startswith("*") or n in self.aligned}
        attributes = {(i,): [_ALIGNED] for i, name in enumerate(names) if name in is_aligned}
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fp_fusion}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return _resources_of(compiled.asm["cubin"], compiled.metadata.shared)

    def source(self) -> str:
        """A hash of what the compilation is made of: the code of the kernel and of all that it calls, and the rest."""
        parts: dict[str, str] = {}
        _collect(self.kernel, parts)
        for name, value in self.constants.items():
            if hasattr(value, "src"):
                _collect(value, parts)
                value = value.fn.__qualname__
            parts[f"constant {name}"] = repr(value)
        options = (self.num_warps, self.num_stages, sorted(self.aligned), self.fp_fusion, triton.__version__)
        text = repr((sorted(parts.items()), sorted(self.types.items()), options))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, order=True)
class Resources:
    """What a program takes: registers per thread, bytes per thread that did not fit into them, shared bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    source: str = field(default="", compare=False)
    """See `Variant.source`."""


def _collect(kernel: Any, parts: dict[str, str]) -> None:
    """The code of a kernel and of its functions, and its global numbers, by module and name."""
    place = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if place in parts:
        return
    parts[place] = inspect.getsource(kernel.fn)
    for name in kernel.fn.__code__.co_names:
        value = kernel.fn.__globals__.get(name)
        if isinstance(value, type(kernel)):
            _collect(value, parts)
        elif isinstance(value, int | float | str | tl.constexpr):
            parts[f"{kernel.fn.__module__}.{name}"] = repr(value)


def _resources_of(cubin: bytes, shared_bytes: int) -> Resources:
    """cuobjdump, which comes with Triton, tells registers and stack; a kernel without arrays has no other stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], shared_bytes)


def all_variants() -> list[Variant]:
    """Of every module beside this one that has `variants`."""
    found: list[Variant] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != "variant":
            make = getattr(importlib.import_module(f"kernels.cuda.{module.name}"), "variants", None)
            found += make() if make is not None else []
    return sorted(found, key=lambda variant: variant.name)


Key = tuple[str, int]
"""A variant's name and a compute capability."""


def _measure(place: tuple[int, int]) -> tuple[Key, Resources]:
    variant, capability = all_variants()[place[0]], place[1]
    return (variant.name, capability), replace(variant.compile(capability), source=variant.source())


def measure(wanted: Collection[Key] | None = None, num_processes: int | None = None) -> dict[Key, Resources]:
    """Every variant for each of its capabilities, or some of them, compiled side by side."""
    places = [(i, c) for i, variant in enumerate(all_variants()) for c in variant.capabilities]
    if wanted is not None:
        names = [variant.name for variant in all_variants()]
        places = [(i, c) for i, c in places if (names[i], c) in wanted]
    with ProcessPoolExecutor(num_processes or os.cpu_count()) as pool:
        return dict(pool.map(_measure, places))


def changed(table: Mapping[Key, Resources]) -> set[Key]:
    """Whose source is not the table's: another kernel, another constant, or another version of Triton."""
    every = [(variant, variant.source()) for variant in all_variants()]
    return {
        (variant.name, capability)
        for variant, source in every
        for capability in variant.capabilities
        if (key := (variant.name, capability)) not in table or table[key].source != source
    }


def sample() -> set[Key]:
    """One variant of every kernel: that the compiler is there, and still gives what the table has."""
    firsts: dict[str, str] = {}
    for variant in all_variants():
        if _CHECKED_CAPABILITY in variant.capabilities:
            firsts.setdefault(variant.kernel.fn.__qualname__ + variant.kernel.fn.__module__, variant.name)
    return {(name, _CHECKED_CAPABILITY) for name in firsts.values()}


def every_key() -> set[Key]:
    """All that the table must have."""
    return {(variant.name, capability) for variant in all_variants() for capability in variant.capabilities}


def read_table() -> dict[Key, Resources]:
    """The ceilings."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["variant"], int(row["capability"])): Resources(
            int(row["registers"]), int(row["spill_bytes"]), int(row["shared_bytes"]), row["source"]
        )
        for row in rows
    }


def write_table(found: Mapping[Key, Resources]) -> None:
    """Writes the ceilings."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEADER)
        for (name, capability), r in sorted(found.items()):
            writer.writerow((name, capability, r.registers, r.spill_bytes, r.shared_bytes, r.source))


def differences(found: Mapping[Key, Resources], table: Mapping[Key, Resources]) -> list[str]:
    """What is above its ceiling, or not in the table."""
    said = [f"{name} sm_{c}: not in the table" for name, c in sorted(found.keys() - table.keys())]
    for key in sorted(found.keys() & table.keys()):
        got, most = found[key], table[key]
        for name in _FIGURES:
            if getattr(got, name) > getattr(most, name):
                said.append(f"{key[0]} sm_{key[1]}: {getattr(got, name)} {name}, at most {getattr(most, name)}")
    return said


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--changed", action="store_true", help="compile what changed and a sample of the rest")
    which.add_argument("--write", action="store_true", help="compile what changed and write the table")
    options = parser.parse_args(argv)
    table = read_table() if TABLE.exists() else {}
    if options.write:
        new = changed(table)
        kept = {key: row for key, row in table.items() if key in every_key() - new}
        write_table(kept | measure(new))
        return 0
    found = measure(changed(table) | sample() if options.changed else None)
    said = [f"{name} sm_{c}: no kernel has it" for name, c in sorted(table.keys() - every_key())]
    said += differences(found, table)
    print("\n".join(said) or f"{len(found)} of {len(table)} compilations, all within {TABLE.name}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
