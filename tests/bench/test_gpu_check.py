"""The check for machines with a GPU, run dry: every section, in Triton's interpreter, with tiny shapes."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check import parity
from bench.gpu_check.__main__ import MAX_SECONDS, SECTIONS, SHARES
from bench.gpu_check.report import write

ROOT = Path(__file__).parents[2]


def check(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu_check", *flags]
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PAGEWIRE_KERNELS")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    env = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def read(folder: Path) -> dict[str, Any]:
    """What the check wrote."""
    found: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text())
    return found


def test_dry_run(tmp_path: Path) -> None:
    done = check("--dry-run", "--out", str(tmp_path), "--seconds", "250", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(tmp_path)
    assert found["notes"] == [] and found["machine"]["seed"] == 3
    sections = found["sections"]
    assert set(sections) == {"limits", "parity", "decode", "prefill", "small", "steps", "flex"}
    assert all(row["ok"] == "yes" for row in sections["parity"])
    assert all(row["token error"] <= row["token limit"] for row in sections["parity"] if "token error" in row)
    scaled = {row["operation"] for row in sections["parity"] if "a scale per head" in row["what"]}
    assert scaled == {"paged_attention", "write_kv", "rotate_and_write_kv"}
    assert {"paged_attention", "rms_norm", "sample"} <= {row["operation"] for row in sections["parity"]}
    assert all(row["GB/s"] > 0 for row in (*sections["decode"], *sections["small"]))
    assert {row["KV"] for row in sections["decode"]} == {"float32", "float8_e4m3fn"}
    assert all(row["TFLOP/s"] > 0 for row in sections["prefill"])
    for row in sections["steps"]:
        names = [f"{what}, {how} ms" for what in ("model", "worker") for how in ("graphs", "eager")]
        assert all(row[name] > 0 for name in names) and "note" not in row
    assert [bar["is_met"] for bar in found["bars"][:2]] == [True, None]
    with (tmp_path / "parity.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(sections["parity"])


def with_module(folder: Path, code: str) -> dict[str, str]:
    """The environment in which every process runs some code before anything else."""
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "protos")])
    return {"PYTHONPATH": path, "PAGEWIRE_KERNELS": "interpreter"}


def test_an_operation_that_is_wrong_or_breaks_the_device_fails_the_check(tmp_path: Path) -> None:
    """One is a little wrong; another breaks its process's device, which those after it are not blamed for."""
    environ = with_module(
        tmp_path,
        """\
import kernels
from bench.gpu_check import parity
from bench.gpu_check.setting import DeviceLost, Setting

right = kernels.silu_and_mul.implementations["cuda"]
kernels.silu_and_mul.implementations["cuda"] = lambda gate_up: right(gate_up) * 1.01
names = ("zero_blocks", "copy_blocks", "add_bias", "silu_and_mul")
wanted = [parity.Task(name, parity.torch.float32) for name in names]
parity.tasks = lambda is_dry: wanted

def require_device(self, after):
    if after == "copy_blocks float32":
        raise DeviceLost(f"{after} broke the device: an illegal address")

Setting.require_device = require_device
""",
    )
    done = check("--dry-run", "--out", str(tmp_path / "out"), "--sections", "parity", **environ)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT MET      parity of every operation: not copy_blocks float32, silu_and_mul float32" in done.stdout
    assert "NOT MEASURED decode attention" in done.stdout
    rows = read(tmp_path / "out")["sections"]["parity"]
    assert {row["operation"]: row["ok"] for row in rows} == {
        "zero_blocks": "yes", "copy_blocks": "NO", "add_bias": "yes", "silu_and_mul": "NO"
    }  # fmt: skip
    broken = next(row for row in rows if row["operation"] == "copy_blocks")
    assert "copy_blocks float32 broke the device: an illegal address" in broken["what"]
    assert broken["error"] == "inf", "JSON has no infinity"


def test_a_lost_device_stops_the_check_and_keeps_what_was_measured(tmp_path: Path) -> None:
    environ = with_module(
        tmp_path,
        """\
from bench.gpu_check.setting import DeviceLost, Setting

def require_device(self, after):
    if after == "prefill: 1 5":
        raise DeviceLost(f"{after} broke the device: an illegal address")

Setting.require_device = require_device
""",
    )
    done = check("--dry-run", "--out", str(tmp_path / "out"), "--sections", "prefill,small", **environ)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stopped: prefill: 1 5 broke the device: an illegal address" in done.stdout
    found = read(tmp_path / "out")
    assert found["notes"] == ["prefill: 1 5 broke the device: an illegal address"]
    assert set(found["sections"]) == {"limits", "prefill"} and len(found["sections"]["prefill"]) == 1


def test_steps_need_little_of_transformers(tmp_path: Path) -> None:
    """A machine with a GPU may have an older one than a worker needs: these three modules are all that is imported."""
    package = tmp_path / "transformers"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '5.17.0'\n")
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "import_utils.py").write_text("")
    (package / "modeling_rope_utils.py").write_text("ROPE_INIT_FUNCTIONS = {}\n")
    code = "import sys; from bench.gpu_check import decode_step, setting; import transformers\n"
    code += "run = setting.Setting(setting.torch.device('cpu'), True, 1, 0.0)\n"
    code += "print(transformers.__version__, decode_step.build_model(run).config.num_layers)\n"
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "protos")])
    env = os.environ | {"PYTHONPATH": path, "PAGEWIRE_KERNELS": "interpreter"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "5.17.0 1\n", done.stderr


def test_what_is_no_number_is_text_in_json(tmp_path: Path) -> None:
    rows = [{"error": math.inf, "other": [math.nan, 1.5]}]
    write(tmp_path, {"seed": 1}, {"parity": rows}, [], [])
    assert read(tmp_path)["sections"]["parity"] == [{"error": "inf", "other": ["nan", 1.5]}]


def test_one_wrong_token_is_found() -> None:
    """Where the mean of all is far below its limit."""
    expected = torch.randn(5000, 4, 16, generator=torch.Generator().manual_seed(1))
    got = expected.clone()
    assert parity.error_of(got, expected) == parity.token_error_of(got, expected) == 0.0
    got[17] *= 1.1
    assert parity.error_of(got, expected) < parity.MAX_ERROR[torch.float16]
    assert parity.token_error_of(got, expected) > parity.MAX_TOKEN_ERROR[torch.bfloat16]
    got[17, 0, 0] = math.nan
    assert parity.error_of(got, expected) == parity.token_error_of(got, expected) == math.inf


def test_a_slow_section_leaves_time_to_those_after_it() -> None:
    left, last = MAX_SECONDS, ""
    for name, least in (("parity", 150), ("decode", 60), ("prefill", 30), ("small", 25), ("steps", 55), ("flex", 45)):
        share = left * SHARES[name]
        assert share >= least, name
        left, last = left - share, name
    assert last == SECTIONS[-1] and left == 0.0


def test_what_cannot_be_run_is_said() -> None:
    assert "unknown nonsense" in check("--sections", "nonsense").stderr
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['triton'] = None; import bench.gpu_check.__main__ as check\n"
         "check.main(['--dry-run'])"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "Triton is not installed" in done.stderr, done.stderr
    if not torch.cuda.is_available():
        done = check()
        assert done.returncode == 1 and "sees no CUDA device" in done.stderr
