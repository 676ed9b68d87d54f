"""Loading: sources, formats, limits, and what a user is told where it can't work."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny_models
import torch
import transformers
from paged_harness import paged_logits, random_sequences, relative_error
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, build, eager_logits
from transformers import AutoModelForCausalLM

from pagewire.errors import InvalidArgumentError, NotFoundError, UnavailableError
from worker_svc.models import limits, sources
from worker_svc.models.loader import load_model

Directory = Callable[[str], Path]


@pytest.fixture
def llama(tiny_directory: Directory, tmp_path: Path) -> Path:
    """A copy of a small Llama that a test may damage."""
    return Path(shutil.copytree(tiny_directory("llama"), tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(directory: Path, **options: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        load_model(str(directory), **options)
    return caught.value


def test_info_of_a_directory(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[2, 7], temperature=0.6, top_p=0.9, do_sample=True)
    loaded = load_model(str(llama))
    info = loaded.info
    assert (info.model, info.architecture, info.dtype) == ("model", "LlamaForCausalLM", "float32")
    assert (info.vocab_size, info.max_model_len, info.num_layers) == (VOCAB_SIZE, tiny_models.MAX_LEN, 3)
    assert info.eos_token_ids == (2, 7)
    assert info.num_parameters == sum(p.numel() for p in build("llama").parameters())
    defaults = json.loads(loaded.tokenizer_files["generation_config.json"])
    assert defaults["temperature"] == 0.6 and defaults["top_p"] == 0.9 and defaults["eos_token_id"] == [2, 7]


@pytest.mark.parametrize("force_generic", [False, True])
def test_sharded_safetensors(force_generic: bool, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load_model(str(tmp_path), force_generic=force_generic).model
    sequences = random_sequences(VOCAB_SIZE)
    assert relative_error(paged_logits(model, sequences), eager_logits(build("llama"), sequences)) <= 2e-5


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in str(refused(tmp_path))


@pytest.mark.parametrize("force_generic", [False, True])
def test_truncated_weights_are_named(llama: Path, force_generic: bool) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = str(refused(llama, force_generic=force_generic))
    assert "model.safetensors" in message and "truncated" in message


def test_truncated_gguf_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        copy.write_bytes(file.read(5_000_000))
    assert "cut.gguf" in str(refused(copy))


@pytest.mark.parametrize("force_generic", [False, True])
def test_missing_tensor_is_named(llama: Path, force_generic: bool) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in str(refused(llama, force_generic=force_generic))


def test_unknown_tensor_and_wrong_shape_are_named(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.scales": torch.ones(2)}, llama / "model.safetensors")
    assert "q_proj.scales" in str(refused(llama))
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, llama / "model.safetensors")
    assert "model.norm.weight has shape (3,), the configuration says (64,)" in str(refused(llama))


def test_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(NotFoundError, match=r"no model\.safetensors.*pytorch_model\.bin is a pickle"):
        load_model(str(llama))


def test_no_such_path() -> None:
    with pytest.raises(NotFoundError, match="/nowhere/model"):
        load_model("/nowhere/model")


def test_broken_configurations(llama: Path) -> None:
    (llama / "generation_config.json").write_text("{")
    assert "generation_config.json" in str(refused(llama))
    edit_json(llama / "config.json", model_type="never_heard_of")
    assert "never_heard_of" in str(refused(llama))
    (llama / "config.json").write_text("{")
    assert "config.json" in str(refused(llama))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "x"},
        {"rms_norm_eps": None},
        {"eos_token_id": [None]},
        {"rope_parameters": {"rope_type": "never_heard_of", "rope_theta": 1e4}},
    ],
)
def test_a_configuration_that_makes_no_sense(llama: Path, changes: dict[str, Any]) -> None:
    edit_json(llama / "config.json", **changes)
    assert refused(llama).reason == "BAD_MODEL_FILES"


@pytest.mark.parametrize(
    ("eos", "expected"),
    [(-1, (2,)), (VOCAB_SIZE, (2,)), ([7, VOCAB_SIZE, 7, 3], (7, 3)), ([], (2,)), ([None, 5], (5,))],
)
def test_ids_that_are_no_tokens_end_nothing(llama: Path, eos: object, expected: tuple[int, ...]) -> None:
    """They would get every request refused."""
    edit_json(llama / "generation_config.json", eos_token_id=eos)
    assert load_model(str(llama)).info.eos_token_ids == expected


def test_unused_tensors_are_told(tiny_directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Path(shutil.copytree(tiny_directory("gpt2"), tmp_path / "model"))
    edit_json(model / "config.json", n_layer=2, num_hidden_layers=2)
    load_model(str(model))
    assert "tensors are not used" in caplog.text and ".h.2." in caplog.text


def test_hub_out_of_reach() -> None:
    """A hub id that is not in the cache ends soon, with an error that names it."""
    code = (
        "from pagewire.errors import UnavailableError\n"
        "from worker_svc.models.loader import load_model\n"
        "try:\n    load_model('no-such-owner/no-such-model')\n"
        "except UnavailableError as error:\n    print(error)"
    )
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=90)
    assert "'no-such-owner/no-such-model' is not on this machine" in result.stdout, result.stderr


def test_hub_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own client would wait for ever."""
    session = huggingface_hub.get_session()
    before = session.timeout
    monkeypatch.setattr(sources, "HUB_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.hf_api.constants, "ENDPOINT", huggingface_hub.constants.ENDPOINT)
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="the hub can't be reached"):
            sources.locate("no-such-owner/no-such-model")
    assert time.monotonic() - started < 20
    assert session.timeout == before, "the process may have other uses for its client"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "float8_e4m3"}, "dtype"),
        ({"quantization": "awq"}, "quantization"),
        ({"max_model_len": 97}, "max_model_len"),
        ({"load_format": "pickle"}, "load_format"),
        ({"load_format": "gguf"}, "load_format"),
    ],
)
def test_bad_options_name_their_field(llama: Path, options: dict[str, Any], field: str) -> None:
    error = refused(llama, **options)
    assert [v.field for v in error.violations] == [field]


def test_max_model_len_shortens(llama: Path) -> None:
    assert load_model(str(llama), max_model_len=40).info.max_model_len == 40


def test_longrope_is_limited_to_its_original_length(tiny_directory: Directory) -> None:
    assert load_model(str(tiny_directory("phi3-longrope"))).info.max_model_len == 48


def test_quantized_weights_are_refused(llama: Path) -> None:
    edit_json(llama / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    error = refused(llama)
    assert "awq" in str(error) and error.reason == "UNSUPPORTED_QUANTIZATION"


def test_dtype_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(dtype="bfloat16")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for has_bfloat16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(limits, "cpu_has_bfloat16", lambda has=has_bfloat16: has)
        assert limits.choose_dtype("", config, device=cpu, is_gguf=False) == expected
        assert limits.choose_dtype("", config, device=cpu, is_gguf=True) == torch.float32
    assert limits.choose_dtype("", config, device=cuda, is_gguf=False) == torch.bfloat16
    saved_half = transformers.LlamaConfig(dtype="float16")
    assert limits.choose_dtype("", saved_half, device=cpu, is_gguf=False) == torch.float32
    assert limits.choose_dtype("float16", config, device=cpu, is_gguf=False) == torch.float16


@pytest.mark.parametrize("force_generic", [False, True])
def test_dummy_weights_are_the_same_everywhere(llama: Path, force_generic: bool) -> None:
    (llama / "model.safetensors").unlink()
    first, second = (load_model(str(llama), load_format="dummy", force_generic=force_generic) for _ in range(2))
    sequences = random_sequences(VOCAB_SIZE)
    for a, b in zip(paged_logits(first.model, sequences), paged_logits(second.model, sequences), strict=True):
        assert torch.equal(a, b) and a.std() > 0
    assert first.info == second.info


def test_weights_id_is_of_the_content(llama: Path, tmp_path: Path) -> None:
    first = load_model(str(llama)).info
    copy = Path(shutil.copytree(llama, tmp_path / "other"))
    assert load_model(str(copy)).info.weights_id == first.weights_id
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(copy)).info.weights_id != first.weights_id


# Architectures that paged attention can't serve; each is refused by name and never run wrongly.
TINY = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "BloomForCausalLM": ("BloomConfig", {**TINY, "n_layer": 2, "n_head": 4}),
    "FalconForCausalLM": ("FalconConfig", {**TINY, "alibi": True}),
    "MptForCausalLM": ("MptConfig", {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}),
    "BertForMaskedLM": ("BertConfig", {**TINY, "intermediate_size": 32, "architectures": ["BertForMaskedLM"]}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "num_layers": 2, "architectures": ["T5ForConditionalGeneration"]},
    ),
}


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_unservable_architectures_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    config_class, options = REFUSED[architecture]
    getattr(transformers, config_class)(**options).save_pretrained(tmp_path)
    error = refused(tmp_path, load_format="dummy")
    assert error.reason == "UNSUPPORTED_ARCHITECTURE"
    named = architecture if architecture != "BertForMaskedLM" else "Bert"
    assert named in str(error)


def test_bloom_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """The probe finds that its attention does not go through ours."""
    config_class, options = REFUSED["BloomForCausalLM"]
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**options))
    model.save_pretrained(tmp_path)
    message = str(refused(tmp_path))
    assert "BloomForCausalLM" in message and "each layer must route one" in message


def test_a_model_that_differs_from_its_eager_form_is_refused(
    tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where every layer calls us: here our attention forgets the scale."""
    import kernels

    paged_attention = kernels.paged_attention

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return paged_attention(*args[:-1], 1.7 * args[-1], **kwargs)

    monkeypatch.setattr(kernels, "paged_attention", wrong)
    message = str(refused(tiny_directory("gpt2")))
    assert "GPT2LMHeadModel" in message and "differs from its own eager form" in message
