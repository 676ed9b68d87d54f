"""The check for machines with a GPU, run dry: every section, in Triton's interpreter, with tiny shapes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu_check", *flags]
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PAGEWIRE_KERNELS")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    env = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def test_dry_run(tmp_path: Path) -> None:
    done = check("--dry-run", "--out", str(tmp_path), "--seconds", "250", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["notes"] == [] and found["machine"]["seed"] == 3
    sections = found["sections"]
    assert set(sections) == {"limits", "parity", "decode", "prefill", "small", "steps", "flex"}
    assert all(row["ok"] == "yes" for row in sections["parity"])
    assert {"paged_attention", "rms_norm", "sample"} <= {row["operation"] for row in sections["parity"]}
    assert all(row["GB/s"] > 0 for row in (*sections["decode"], *sections["small"]))
    assert all(row["TFLOP/s"] > 0 for row in sections["prefill"])
    for row in sections["steps"]:
        names = [f"{what}, {how} ms" for what in ("model", "worker") for how in ("graphs", "eager")]
        assert all(row[name] > 0 for name in names) and "note" not in row
    assert [bar["is_met"] for bar in found["bars"][:2]] == [True, None]
    with (tmp_path / "parity.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(sections["parity"])


def test_an_operation_that_is_wrong_fails_the_check(tmp_path: Path) -> None:
    """A module that is imported first makes the gate of silu_and_mul a little wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('PAGEWIRE_KERNELS') == 'interpreter':\n"
        "    import kernels\n"
        "    right = kernels.silu_and_mul.implementations['cuda']\n"
        "    kernels.silu_and_mul.implementations['cuda'] = lambda gate_up: right(gate_up) * 1.01\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "protos")])
    done = check("--dry-run", "--out", str(tmp_path / "out"), "--sections", "parity", PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT MET      parity of every operation: not silu_and_mul float32, silu_and_mul float16" in done.stdout
    assert "NOT MEASURED decode attention" in done.stdout


def test_what_cannot_be_run_is_said() -> None:
    torch = pytest.importorskip("torch")
    assert "unknown nonsense" in check("--sections", "nonsense").stderr
    if not torch.cuda.is_available():
        done = check()
        assert done.returncode == 1 and "sees no CUDA device" in done.stderr
