"""A KV cache of 8 bits: whose scales it has, where they go, and what attention writes its result to."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import kernels
from kernels.kv_layout import cache_shapes
from pagewire.errors import InvalidArgumentError
from worker_svc.models.interface import ForwardBatch, KvCaches
from worker_svc.models.kv_scales import parse_name, warn_without_scales
from worker_svc.models.loader import load_model
from worker_svc.models.native import Decoder

NUM_LAYERS, NUM_KV_HEADS, BLOCK = 2, 2, 4
LARGE = 400.0
KV_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose values are beyond what 8 bits hold."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=NUM_KV_HEADS, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data *= LARGE
        layer.self_attn.o_proj.weight.data /= LARGE
    path = tmp_path_factory.mktemp("kv") / "plain"
    model.save_pretrained(path)
    return path


def with_scales(plain: Path, folder: Path, scales: dict[str, torch.Tensor], quantization: object = KV_ALONE) -> Path:
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors") | scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def scales_of_layers(key: float = 0.05, value: float = 20.0) -> dict[str, torch.Tensor]:
    found = {}
    for i in range(NUM_LAYERS):
        prefix = f"model.layers.{i}.self_attn"
        found[f"{prefix}.k_scale"] = torch.tensor([key * (i + 1)])
        found[f"{prefix}.v_scale"] = torch.tensor(value * (i + 1))
    return found


def load(folder: Path) -> Decoder:
    model = load_model(str(folder), dtype="float32").model
    assert isinstance(model, Decoder)
    return model


def make_caches(model: Decoder, dtype: torch.dtype, *, is_device: bool = False) -> KvCaches:
    caches: KvCaches = []
    for spec in model.kv_cache_specs():
        shapes = cache_shapes(4, BLOCK, spec.num_kv_heads, spec.head_size, dtype=dtype, device=torch.device("cpu"))
        if is_device:
            shapes = ((4, BLOCK, spec.num_kv_heads, spec.head_size),) * 2
        keys, values = (torch.zeros(shape).to(dtype) for shape in shapes)
        caches.append((keys, values))
    return caches


def forward(model: Decoder, caches: KvCaches) -> torch.Tensor:
    """A prompt of seven tokens and another of one."""
    batch = ForwardBatch(
        torch.arange(8) * 11, torch.tensor([0, 1, 2, 3, 4, 5, 6, 0]), torch.tensor([0, 7, 8]).int(),
        torch.tensor([7, 1]).int(), torch.tensor([[1, 2], [3, 0]]).int(),
        torch.tensor([4, 5, 6, 7, 8, 9, 10, 12]), 7, 7,
    )  # fmt: skip
    return model.forward(batch, caches)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def test_scales_of_a_checkpoint_are_used_by_a_cache_of_8_bits_alone(plain, tmp_path, monkeypatch) -> None:
    scaled, unscaled, seen = load(with_scales(plain, tmp_path / "scaled", scales_of_layers())), load(plain), []
    for name in ("rotate_and_write_kv", "paged_attention"):
        operation = getattr(kernels, name)

        def watched(*args, f=operation, **kwargs):
            seen.append((kwargs.get("key_scale"), kwargs.get("value_scale")))
            return f(*args, **kwargs)

        monkeypatch.setattr(kernels, name, watched)
    expected = forward(unscaled, make_caches(unscaled, torch.float32))
    assert torch.equal(forward(scaled, make_caches(scaled, torch.float32)), expected)
    assert seen == [(None, None)] * 4 * NUM_LAYERS
    seen.clear()
    assert error(forward(scaled, make_caches(scaled, torch.float8_e4m3fn)), expected) < 0.1
    values = [tuple(scale.tolist() for scale in pair) for pair in seen]
    assert values == [(pytest.approx([0.05 * n]), [20.0 * n]) for n in (1, 1, 2, 2)]
    assert error(forward(unscaled, make_caches(unscaled, torch.float8_e4m3fn)), expected) > 0.2


def test_scales_move_with_the_weights(plain, tmp_path) -> None:
    model = load(with_scales(plain, tmp_path / "moves", scales_of_layers()))
    model.move_weights(torch.device("meta"))
    assert model.layers[1].attention.key_scale.device.type == "meta"  # type: ignore[union-attr]


def test_names_of_scales() -> None:
    assert parse_name("model.layers.12.self_attn.k_scale") == (12, True)
    assert parse_name("model.layers.0.self_attn.v_scale") == (0, False)
    assert parse_name("model.layers.3.self_attn.k_proj.k_scale") == (3, True)
    assert parse_name("model.layers.3.self_attn.v_proj.v_scale") == (3, False)
    for other in ("model.layers.3.self_attn.k_proj.v_scale", "model.layers.3.mlp.k_scale", "x.model.layers.3.k_scale"):
        assert parse_name(other) is None


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("model.layers.0.self_attn.k_scale", [1.0, 2.0, 3.0], "has 3 numbers.*2 KV heads"),
        ("model.layers.0.self_attn.v_scale", [0.0], "must be above 0"),
        ("model.layers.9.self_attn.k_scale", [1.0], "does not know"),
        ("model.layers.0.self_attn.q_scale", [1.0], "does not know"),
    ],
)
def test_scales_that_are_wrong_are_refused_by_name(plain, tmp_path, name, scale, message) -> None:
    folder = with_scales(plain, tmp_path / "wrong", {name: torch.tensor(scale)})
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        load(folder)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": {"type": "int", "num_bits": 8}},
        {"kv_cache_scheme": KV_ALONE["kv_cache_scheme"] | {"dynamic": True}},
        {"quant_method": "fp8"},
    ],
)
def test_other_quantization_is_refused(plain, tmp_path, changes) -> None:
    folder = with_scales(plain, tmp_path / "other", scales_of_layers(), KV_ALONE | changes)
    with pytest.raises(InvalidArgumentError, match="quantized weights are not supported"):
        load(folder)


def test_a_cache_without_scales_is_named_in_the_log(plain, tmp_path, caplog) -> None:
    scaled, unscaled = load(with_scales(plain, tmp_path / "scaled", scales_of_layers())), load(plain)
    with caplog.at_level(logging.WARNING):
        warn_without_scales(scaled, torch.float8_e4m3fn)
        warn_without_scales(unscaled, torch.bfloat16)
        assert "no scales" not in caplog.text
        warn_without_scales(unscaled, torch.float8_e4m3fn)
    assert "no scales" in caplog.text


@pytest.mark.parametrize("is_native", [True, False])
def test_attention_on_a_device_writes_to_memory_that_nobody_fills_first(plain, monkeypatch, is_native) -> None:
    model = load_model(str(plain), dtype="float32", force_generic=not is_native).model
    expected = forward(model, make_caches(model, torch.float32))
    attend, empty_like, given = kernels.paged_attention, torch.empty_like, []

    def watched(*args, out=None, **kwargs):
        given.append(out)
        return attend(*args, out=out, **kwargs)

    monkeypatch.setattr(kernels, "paged_attention", watched)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(torch.nan))
    forward(model, make_caches(model, torch.float32))
    assert given == [None] * NUM_LAYERS, "a CPU's programs take the memory that they were recorded with"
    given.clear()
    got = forward(model, make_caches(model, torch.float32, is_device=True))
    assert all(out is not None and out.is_contiguous() for out in given) and len(given) == NUM_LAYERS
    assert error(got, expected) < 1e-5
