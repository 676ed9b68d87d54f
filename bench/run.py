"""`make bench` and `make bench-peers`: one command, one table.

    python -m bench.run [--peers vllm,llama] [--sections single,batch] [--repeats 3] [--max-seconds 120] [--write]

Every figure is a median over passes with its range. Sides take their passes in turn and ratios are taken pass by
pass, so that they hold where the machine's speed drifts. `--write` merges the figures into bench/results.csv and
BENCHMARKS.md and draws the plot: several runs, each of some sections, make one table.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from pathlib import Path

from bench.context import Context
from bench.deployments import is_installed
from bench.machine import describe_machine
from bench.peers.install import write_models
from bench.process_group import ROOT
from bench.record import Recorder, merge, read, write
from bench.report import markdown, print_bars, replace_marked
from bench.sections import SECTIONS

RESULTS = ROOT / "bench/results.csv"
REPORT = ROOT / "BENCHMARKS.md"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="vllm, llama or both, comma-separated (default: ours alone)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="counted passes (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, default=150, help="no pass of a workload starts later (default: 150)"
    )
    parser.add_argument("--limit", type=int, help="only the first so many requests of each workload, to try things out")
    parser.add_argument("--csv", type=Path, help="also merge the figures into this file")
    parser.add_argument("--write", action="store_true", help="merge into bench/results.csv, BENCHMARKS.md and the plot")
    args = parser.parse_args(argv)
    args.sections = args.sections.split(",")
    args.peers = frozenset(filter(None, args.peers.split(",")))
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"--sections knows {', '.join(SECTIONS)}; not {', '.join(sorted(unknown))}")
    if unknown := args.peers - {"vllm", "llama"}:
        parser.error(f"--peers knows vllm and llama; not {', '.join(sorted(unknown))}")
    if missing := [peer for peer in sorted(args.peers) if not is_installed(peer)]:
        parser.error(f"{' and '.join(missing)} not installed: python -m bench.peers.install")
    if args.limit and args.write:
        parser.error("--write is for whole workloads, not with --limit")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sides end too
    write_models("smollm2")
    command = "python -m bench.run " + " ".join(argv)
    recorder = Recorder(datetime.date.today().isoformat(), describe_machine(), command.strip())
    context = Context(recorder, args.peers, args.repeats, args.max_seconds, args.limit)
    started = time.monotonic()
    try:
        for name in args.sections:
            section_started = time.monotonic()
            print(f"\n{name}", flush=True)
            try:
                SECTIONS[name](context)
            except Exception as error:  # the other sections' figures must not be lost
                recorder.fail(name, name, f"{type(error).__name__}: {error}")
            print(f"  ({time.monotonic() - section_started:.0f} s)", flush=True)
            save(args, recorder)
    finally:
        context.close()
    print_bars(merge(read(RESULTS), recorder.figures) if args.write else recorder.figures)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    return 1 if any(figure.has_failed for figure in recorder.figures) else 0


def save(args: argparse.Namespace, recorder: Recorder) -> None:
    """After each section, so that a run that is cut off loses no section that was whole."""
    if args.csv:
        write(args.csv, merge(read(args.csv), recorder.figures))
    if args.write:
        figures = merge(read(RESULTS), recorder.figures)
        write(RESULTS, figures)
        replace_marked(REPORT, markdown(figures))
        try:
            from bench.plot import draw
        except ImportError as error:
            print(f"  (no plot: {error}; pip install 'pagewire[bench]')", flush=True)
        else:
            draw(figures, ROOT / "bench/ratios.svg")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
