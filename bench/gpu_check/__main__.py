"""`python -m bench.gpu_check`: correctness and speed of the CUDA path on the GPU at hand, in eight minutes.

    python -m bench.gpu_check --out FOLDER              everything; exit status 1 where parity fails
    python -m bench.gpu_check --sections parity,decode  some of it
    python -m bench.gpu_check --dry-run                 on a CPU, in Triton's interpreter, with tiny shapes

Needs torch, triton, numpy and transformers, and this repository with its folder protos on PYTHONPATH; no network.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_check.report import Bar, Row
    from bench.gpu_check.setting import Setting

SECTIONS = ("parity", "decode", "prefill", "small", "steps", "flex")
MAX_SECONDS, _GRACE_S = 450.0, 25.0
SHARES = {"parity": 0.40, "decode": 0.30, "prefill": 0.20, "small": 0.25, "steps": 0.55, "flex": 1.0}
"""Most of what is left at its start that a section may take; what it does not need is the next one's. Where each takes
all of it: 180, 81, 38, 38, 62 and 51 seconds of 450."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for JSON and CSV")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="time that all of it may take")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; left out: a fresh one")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU in Triton's interpreter")
    found = parser.parse_args(argv)
    unknown = set(found.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"--sections: unknown {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return found


def new_setting(options: argparse.Namespace) -> Setting:
    """The device, seeded. Raises SystemExit where there is no GPU and it is no dry run."""
    from bench.gpu_check.setting import Setting, require_compiler, require_triton

    require_triton()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA device; --dry-run proves the script on a CPU")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    torch.manual_seed(seed)
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    require_compiler(device)
    return Setting(device, options.dry_run, seed, time.monotonic() + options.seconds)


def machine(setting: Setting) -> Row:
    """What the figures were taken on, and when."""
    import torch
    import triton

    is_cuda = setting.device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": torch.cuda.get_device_name(setting.device) if is_cuda else "CPU, Triton's interpreter (dry run)",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(setting.device))) if is_cuda else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "seed": setting.seed,
    }


def label(row: Row) -> str:
    """What a row is of: its first columns, up to the figures."""
    return " ".join(str(value) for name, value in row.items() if isinstance(value, str | int) and name != "note")


def fill(setting: Setting, name: str, module: str, function: str, rows: list[Row]) -> tuple[str, bool]:
    """Appends a section's rows; returns what stopped it, "" where nothing did, and whether the device is lost."""
    from bench.gpu_check.setting import DeviceLost, first_line

    note, before = "", "its start"
    try:
        # Imported here: a package that one section lacks is no reason to measure nothing.
        for row in getattr(importlib.import_module(module), function)(setting):
            rows.append(row)
            before = label(row)
            setting.require_device(f"{name}: {before}")
    except DeviceLost as error:
        return str(error), True
    except Exception as error:
        if name == "limits":
            raise  # every share is of these
        note = f"{name}: {first_line(error)}"
    try:
        setting.require_device(f"{name}: what came after {before}")
    except DeviceLost as error:
        return f"{note}; {error}" if note else str(error), True
    return note, False


def run_sections(
    setting: Setting, wanted: Sequence[str], notes: list[str], save: Callable[[dict[str, list[Row]]], None]
) -> dict[str, list[Row]]:
    """Rows by section, saved after each; a section that raises leaves its rows and a note, and the others run.

    They do not where the device is lost: whatever they did would fail for a reason that is not theirs.
    """
    from bench.gpu_check.report import table

    places = {
        "limits": ("setting", "measure_limits"),
        "parity": ("parity", "run"),
        "decode": ("attention", "decode"),
        "prefill": ("attention", "prefill"),
        "small": ("small_kernels", "run"),
        "steps": ("decode_step", "run"),
        "flex": ("attention", "flex"),
    }
    found: dict[str, list[Row]] = {}
    ends_at = setting.ends_at
    for name, (module, function) in places.items():
        if name not in wanted and name != "limits":
            continue
        started = time.monotonic()
        share = 1.0 if setting.is_dry else SHARES.get(name, 1.0)
        setting.ends_at = min(ends_at, started + (ends_at - started) * share)
        rows = found.setdefault(name, [])
        note, is_lost = fill(setting, name, f"bench.gpu_check.{module}", function, rows)
        if note:
            notes.append(note)
            if name == "parity":
                rows.append({"operation": "parity", "what": note, "ok": "NO"})
        save(found)
        print(f"\n== {name} ({time.monotonic() - started:.1f} s)\n{table(rows)}", flush=True)
        if is_lost:
            print(f"stopped: {note}", flush=True)
            break
        if setting.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
    setting.ends_at = ends_at
    return found


def all_bars(found: dict[str, list[Row]]) -> list[Bar]:
    """Parity and the speeds, each met, not met or not measured."""
    from bench.gpu_check import attention, decode_step
    from bench.gpu_check.report import Bar

    rows = found.get("parity", [])
    bad = [f"{row['operation']} {row.get('dtype', '')}" for row in rows if row["ok"] != "yes"]
    text = f"not {', '.join(bad)}" if bad else f"{len(rows)} checks"
    return [
        Bar("parity of every operation", text, not bad if rows else None),
        *attention.bars(found.get("decode", []), found.get("prefill", [])),
        *decode_step.bars(found.get("steps", [])),
    ]


def main(argv: Sequence[str]) -> int:
    """See the module; returns the exit status."""
    options = parse(argv)
    if options.dry_run:
        # Both before triton is imported: it decorates functions of its own then.
        os.environ |= {"PAGEWIRE_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}
    # A kernel that hangs can't be interrupted: what was saved until then stays.
    faulthandler.dump_traceback_later(options.seconds + _GRACE_S, exit=True)
    setting, notes = new_setting(options), list[str]()
    from bench.gpu_check.report import write

    described = machine(setting)
    print(", ".join(f"{name} {value}" for name, value in described.items() if value != ""), flush=True)

    def save(found: dict[str, list[Row]]) -> None:
        write(options.out, described, found, all_bars(found), notes)

    found = run_sections(setting, options.sections.split(","), notes, save)
    bars = all_bars(found)
    print("\n== bars" + (" (a dry run's times mean nothing)" if setting.is_dry else ""))
    print("\n".join(map(str, bars)))
    for note in notes:
        print(f"note: {note}")
    save(found)
    print(f"written to {options.out}")
    faulthandler.cancel_dump_traceback_later()
    is_parity_missing = "parity" in options.sections.split(",") and bars[0].is_met is None
    has_failed = bars[0].is_met is False or is_parity_missing or bool(notes)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
