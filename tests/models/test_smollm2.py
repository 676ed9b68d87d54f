"""The default model, read from its GGUF file: logits against transformers, and the tokenizer that is exported."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import torch
from paged_harness import make_batch, make_caches, paged_logits
from reference import Reference
from tokenizers import Tokenizer

from worker_svc.models.loader import LoadedModel, load_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "北京是中国的首都。日本の首都は東京です。",
    "👩‍👩‍👧‍👦 family 😀 emoji é é ﷽",
    "x",
]
CHAT = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Reference:
    return Reference(smollm2_path)


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> LoadedModel:
    stages: list[tuple[str, float]] = []
    loaded = load_model("smollm2", on_progress=lambda stage, fraction: stages.append((stage, fraction)))
    fractions = [fraction for _, fraction in stages]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert len({stage for stage, _ in stages}) >= 4
    return loaded


def test_info(loaded: LoadedModel) -> None:
    info = loaded.info
    assert info.model == "smollm2" and info.architecture == "LlamaForCausalLM" and info.is_native
    assert (info.vocab_size, info.max_model_len, info.num_layers) == (49152, 8192, 30)
    assert info.dtype == "float32" and info.eos_token_ids == (2,)
    assert info.num_parameters == 134_515_008 and info.weights_bytes == 4 * info.num_parameters


def test_logits_at_every_position(loaded: LoadedModel, reference: Reference) -> None:
    prompts = [*PROMPTS, reference.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)]
    sequences = [reference.tokenizer(prompt)["input_ids"] for prompt in prompts]
    got = paged_logits(loaded.model, sequences, block_size=16, chunks=(1, 3, 9, 16))
    for tokens, logits in zip(sequences, got, strict=True):
        expected = reference.logits(tokens)
        assert float((logits - expected).abs().max() / expected.abs().max()) <= 2e-5


def test_greedy_continuation(loaded: LoadedModel, reference: Reference) -> None:
    """Prefill, then one token at a time, against the reference's own cached generation."""
    prompt = reference.tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)["input_ids"]
    tokens, caches, table = list(prompt), make_caches(loaded.model, 12, 16), [4, 1, 9, 7, 3]
    computed = 0
    for _ in range(12):
        batch = make_batch([(tokens, computed, len(tokens))], [table], 16)
        hidden = loaded.model.forward(batch, caches)
        computed = len(tokens)
        tokens.append(int(loaded.model.compute_logits(hidden[-1:]).argmax()))
    output = tokens[len(prompt) :]
    assert reference.check_greedy(prompt, output).num_near_ties == 0
    assert output == reference.greedy(prompt, 12)


def test_check_greedy_has_teeth(reference: Reference) -> None:
    prompt = reference.tokenizer(PROMPTS[0])["input_ids"]
    output = reference.greedy(prompt, 3)
    with pytest.raises(AssertionError, match="output token 1"):
        reference.check_greedy(prompt, [output[0], output[1] + 1, output[2]])


def test_bfloat16(smollm2_path: Path, reference: Reference) -> None:
    loaded = load_model(str(smollm2_path), dtype="bfloat16")
    assert loaded.info.model == smollm2_path.stem
    tokens = reference.tokenizer(PROMPTS[1])["input_ids"]
    (got,) = paged_logits(loaded.model, [tokens], block_size=16, chunks=(9,))
    expected = reference.logits(tokens)
    assert float((got - expected).norm() / expected.norm()) < 0.03


def test_exported_tokenizer(loaded: LoadedModel, reference: Reference) -> None:
    files = loaded.tokenizer_files
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    backend = Tokenizer.from_buffer(files["tokenizer.json"])
    for text in PROMPTS:
        ids = reference.tokenizer(text)["input_ids"]
        assert backend.encode(text).ids == ids
        assert backend.decode(ids, skip_special_tokens=False) == text
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|im_start|>", "<|im_end|>", False)
    assert config["eos_token_id"] == backend.token_to_id("<|im_end|>") == 2
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 2


def test_exported_chat_template(loaded: LoadedModel, reference: Reference) -> None:
    template = jinja2.Template(loaded.tokenizer_files["chat_template.jinja"].decode())
    text = template.render(messages=CHAT, add_generation_prompt=True)
    assert text == reference.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    backend = Tokenizer.from_buffer(loaded.tokenizer_files["tokenizer.json"])
    ids = backend.encode(text).ids
    assert ids[0] == 1 and 2 in ids  # the template's marks are single tokens


def test_rows_do_not_depend_on_their_batch(loaded: LoadedModel) -> None:
    """The same bits alone, in other chunks, and among others.

    Case: vllm#5898
    """
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(0, 49152, (n,), generator=generator).tolist() for n in (30, 12, 130)]
    together = paged_logits(loaded.model, sequences, block_size=16)
    for tokens, expected in zip(sequences, together, strict=True):
        (alone,) = paged_logits(loaded.model, [tokens], block_size=16, chunks=(64,))
        assert torch.equal(alone, expected)


def test_bfloat16_gives_the_same_bits_whatever_the_batch_and_the_chunks(reference: Reference) -> None:
    """Every product, norm and attention of the native decoder has one order per row (README: what is promised)."""
    model = load_model("smollm2", dtype="bfloat16").model
    sequences = [reference.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = [paged_logits(model, [tokens], chunks=(len(tokens),))[0] for tokens in sequences]
    for seed, chunks in enumerate([(1,), (1, 2, 5), (7, 40)]):
        got = paged_logits(model, sequences, seed=seed, chunks=chunks)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
