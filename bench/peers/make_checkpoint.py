"""Writes the model that the peers run, from the GGUF file that we serve: a bfloat16 Hugging Face checkpoint for vLLM.

    python -m bench.peers.make_checkpoint MODEL DIRECTORY

Runs in Pagewire's own environment. The weights are those that our worker computes with: the file's, dequantized to
float32 and rounded to bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import worker_svc.models.transformers_guard  # noqa: F401  (before transformers looks for a package `kernels`)
from worker_svc.models.sources import locate
from worker_svc.models.tokenizer_files import load_tokenizer


def main() -> None:
    source, directory = sys.argv[1], Path(sys.argv[2])
    files = locate(source)
    model = AutoModelForCausalLM.from_pretrained(files.directory, **files.load_args(), dtype=torch.float32)
    # transformers dequantized everything but still calls the model quantized, and would refuse to save it.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(directory)
    load_tokenizer(files).save_pretrained(directory)
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
