"""What a kernel is compiled for, and what a compilation costs: checked for every kernel without a GPU.

python -m kernels.cuda.variant            compiles all variants and compares them with resources.csv
python -m kernels.cuda.variant --write    writes resources.csv anew
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS = ("fp32", "bf16", "fp16")
"""Names of types as signatures have them."""
CAPABILITIES = (80, 90, 100)
TABLE = Path(__file__).parent / "resources.csv"
_HEADER = ("variant", "capability", "registers", "spill_bytes", "shared_bytes")
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


@dataclass(frozen=True, order=True)
class Resources:
    """What a program takes: registers per thread, bytes per thread that did not fit into them, shared bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int


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


def _measure(place: tuple[int, int]) -> tuple[str, int, Resources]:
    variant, capability = all_variants()[place[0]], place[1]
    return variant.name, capability, variant.compile(capability)


def measure_all(num_processes: int | None = None) -> dict[tuple[str, int], Resources]:
    """Every variant for each of its capabilities, compiled side by side."""
    places = [(i, c) for i, variant in enumerate(all_variants()) for c in variant.capabilities]
    with ProcessPoolExecutor(num_processes or os.cpu_count()) as pool:
        return {(name, capability): resources for name, capability, resources in pool.map(_measure, places)}


def read_table() -> dict[tuple[str, int], Resources]:
    """The ceilings."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["variant"], int(row["capability"])): Resources(*(int(row[n]) for n in _HEADER[2:])) for row in rows}


def write_table(found: Mapping[tuple[str, int], Resources]) -> None:
    """Writes the ceilings."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEADER)
        for (name, capability), r in sorted(found.items()):
            writer.writerow((name, capability, r.registers, r.spill_bytes, r.shared_bytes))


def differences(found: Mapping[tuple[str, int], Resources], table: Mapping[tuple[str, int], Resources]) -> list[str]:
    """What is above its ceiling, not in the table, or in the table alone."""
    said = [f"{name} sm_{c}: not in the table" for name, c in sorted(found.keys() - table.keys())]
    said += [f"{name} sm_{c}: no kernel has it" for name, c in sorted(table.keys() - found.keys())]
    for key in sorted(found.keys() & table.keys()):
        got, most = found[key], table[key]
        for name in _HEADER[2:]:
            if getattr(got, name) > getattr(most, name):
                said.append(f"{key[0]} sm_{key[1]}: {getattr(got, name)} {name}, at most {getattr(most, name)}")
    return said


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table anew")
    found = measure_all()
    if parser.parse_args(argv).write:
        write_table(found)
        return 0
    said = differences(found, read_table())
    print("\n".join(said) or f"{len(found)} compilations, all within {TABLE.name}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
