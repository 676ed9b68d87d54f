"""A model of a few thousand weights as a folder that a worker loads: tests of telemetry need real steps, not a text.

Its weights are random (`--load-format=dummy`), its kernels the references in torch (PAGEWIRE_KERNELS), so that three
processes are up in the time that they take to import their libraries.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 512
EOS = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path) -> Path:
    """Writes it; every word of its vocabulary is ASCII. Returns the folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir(parents=True)
    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *(f"w{i}" for i in range(len(special), VOCAB_SIZE))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names})
    )
    return folder
