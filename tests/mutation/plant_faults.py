"""Plants the faults of faults.py one by one in a copy of the sources and checks that the core's tests find each.

    python tests/mutation/plant_faults.py [--only TEXT] [--jobs N]

Exit status 0: every fault was found, and the tests pass without any. 1 otherwise, also where a fault's text is not in
its file exactly once (the source moved on; move the fault along).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


def run_tests(tree: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Runs test files against the sources in `tree`, stopping at the first failure."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "protos")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
    command += ["--hypothesis-profile=no_shrink", *tests]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def copy_tree(destination: Path) -> Path:
    """Copies what the core's tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("core_svc", "protos", "tests/core"):
        shutil.copytree(ROOT / name, destination / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", destination)
    return destination


def try_fault(fault: Fault) -> tuple[Fault, str, float]:
    """Plants one fault; "" if the tests find it, otherwise what went wrong."""
    started = time.monotonic()
    if (count := (ROOT / fault.path).read_text().count(fault.before)) != 1:
        return fault, f"its text is {count} times in {fault.path}", 0.0
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tree = copy_tree(Path(folder))
        path = tree / fault.path
        path.write_text(path.read_text().replace(fault.before, fault.after))
        try:
            done = run_tests(tree, fault.tests)
        except subprocess.TimeoutExpired:
            return fault, f"the tests did not end within {TIMEOUT_S} s", time.monotonic() - started
    # 1 is "tests failed"; anything else (no tests, an error in the file) proves nothing.
    if done.returncode == 1:
        return fault, "", time.monotonic() - started
    return fault, f"pytest ended with {done.returncode}: {done.stdout[-500:]}", time.monotonic() - started


def main() -> int:
    """Tries all faults; prints one line for each."""
    parser = argparse.ArgumentParser(description="Plant small faults and check that the core's tests find them.")
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at once (default 2)")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    if not faults:
        print(f"no fault's name contains {arguments.only!r}")
        return 1
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tests = tuple(sorted({test for fault in faults for test in fault.tests}))
        clean = run_tests(copy_tree(Path(folder)), tests)
        if clean.returncode != 0:
            print(f"the tests fail without any fault:\n{clean.stdout[-2000:]}")
            return 1
    num_missed = 0
    with ThreadPoolExecutor(arguments.jobs) as executor:
        for fault, problem, seconds in executor.map(try_fault, faults):
            print(f"{'found ' if not problem else 'MISSED'} {seconds:5.1f} s  {fault.name}  {problem}", flush=True)
            num_missed += bool(problem)
    print(f"{len(faults) - num_missed} of {len(faults)} faults found")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
