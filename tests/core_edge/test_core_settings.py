"""CoreSettings: what flags and variables become."""

from __future__ import annotations

import pytest

from core_svc.config import EngineConfig
from core_svc.executor import CacheSpec, ModelSpec
from core_svc.settings import CoreSettings
from pagewire.runtime.settings import parse_settings


def test_defaults_are_those_of_the_engine() -> None:
    settings = parse_settings(CoreSettings, "core", [], environ={})
    assert settings.engine_config() == EngineConfig()
    assert settings.model_spec() == ModelSpec()
    assert settings.cache_spec() == CacheSpec()
    assert (settings.port, settings.worker) == (50052, "127.0.0.1:50053")


def test_every_setting_of_the_engine_can_be_set() -> None:
    argv = ["--block-size", "8", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--policy", "priority"]
    argv += ["--no-enable-prefix-caching", "--max-num-requests", "9", "--prefill-schedule-interval", "3"]
    argv += ["--long-prefill-token-threshold", "32", "--log-requests"]
    config = parse_settings(CoreSettings, "core", argv, environ={}).engine_config()
    assert config == EngineConfig(8, 4, 64, 32, "priority", False, 9, 3, log_requests=True)


def test_model_and_pool() -> None:
    environ = {"PAGEWIRE_CORE_MODEL": "smollm2", "PAGEWIRE_DTYPE": "float32", "PAGEWIRE_CORE_NUM_KV_BLOCKS": "100"}
    argv = ["--kv-cache-memory-bytes", "1GiB", "--max-model-len", "512", "--force-generic"]
    settings = parse_settings(CoreSettings, "core", argv, environ=environ)
    assert settings.model_spec() == ModelSpec(model="smollm2", dtype="float32", max_model_len=512, force_generic=True)
    spec = settings.cache_spec()
    assert (spec.num_blocks, spec.memory_bytes) == (101, 2**30), "the null block comes on top"


@pytest.mark.parametrize("address", ["localhost", "", ":50053", "worker:", "worker:0", "worker:65536"])
def test_the_worker_has_an_address_with_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(CoreSettings, "core", ["--worker", address], environ={})
    assert caught.value.code == 2
    assert f"--worker is {address!r}: must be HOST:PORT" in capsys.readouterr().err


def test_a_bad_value_names_flag_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(CoreSettings, "core", ["--block-size", "0"], environ={})
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "--block-size" in message and "[1, 1024]" in message
