"""What the GPU check launches on an H200 is in the table of compilations: every type, size, option and tile.

Its sections run on tensors without memory, and so do the parts of them that a dry run leaves out.
"""

from __future__ import annotations

import time

import pytest
import torch
from launches import Compilation, of_variant, record

import kernels
from bench.gpu_check import attention, parity, small_kernels
from bench.gpu_check.setting import Setting
from kernels.cuda.variant import all_variants


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    for operation in kernels.OPERATIONS.values():
        if "cuda" in operation.implementations:
            monkeypatch.setitem(operation.implementations, "meta", operation.implementations["cuda"])
    return Setting(torch.device("meta"), is_dry=False, seed=1, ends_at=time.monotonic() + 1000)


def missing(launched: list[Compilation]) -> list[str]:
    with_stages = {launch[0] for launch in launched if launch[3] is not None}
    known = {of_variant(variant, variant.kernel.fn.__name__ in with_stages) for variant in all_variants()}
    return sorted(str((name, sorted(parts), *rest)) for name, parts, *rest in set(launched) - known)


def test_parity_of_large_inputs(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = record(monkeypatch)
    tasks = [task for task in parity.tasks(is_dry=False) if task.cache_dtype is not None]
    assert {task.name for task in tasks} == {"paged_attention", "write_kv", "rotate_and_write_kv"}
    for task in tasks:
        before = len(launched)
        row = parity.check(setting, task)
        assert row is not None and len(launched) > before, row
    assert missing(launched) == []


def test_decode_and_prefill(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = record(monkeypatch)
    rows = [*attention.decode(setting), *attention.prefill(setting)]
    assert [row for row in rows if "note" in row] == []
    assert len(rows) == len(attention.DECODES) + len(attention.FP8_DECODES) + len(attention.PREFILLS)
    assert {name for name, *_ in launched} == {"paged_attention_kernel", "_reduce"}
    assert missing(launched) == []


def test_small_kernels(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = record(monkeypatch)
    assert [row for row in small_kernels.run(setting) if "note" in row] == []
    assert {"_rms_norm", "_rotate_and_write_kv", "choose"} <= {name for name, *_ in launched}
    assert missing(launched) == []


def test_a_launch_that_nobody_compiled_is_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = record(monkeypatch)
    kernels.rms_norm(setting.randn(2, 300), setting.randn(300), 1e-5)
    assert len(missing(launched)) == 1 and "'BLOCK', '512'" in missing(launched)[0]
