"""llama.cpp behind the protocol of the benchmark: continuous batching over its C API. Runs in its own environment.

    python bench/peers/llama_offline.py MODEL.gguf [--sequences 64] [--unified] [--threads 2]

A batch holds one token of each sequence that decodes and prompt tokens up to 2,048 in all, as llama.cpp's own server
does it; a prompt's common beginning is computed once and copied (`llama_memory_seq_cp`). Greedy choice is numpy's
argmax over the logits, which is cheaper than llama.cpp's own sampler chain.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os

import llama_cpp as lib
import numpy as np
from protocol import answers, serve

MAX_BATCH = 2048
CONTEXT_PER_SEQUENCE = 1024


class Sequence:
    """One request: tokens not yet computed, tokens made, tokens still to make."""

    def __init__(self, row: int, prompt: list[int], num_tokens: int) -> None:
        self.row, self.owed, self.num_left = row, prompt, num_tokens
        self.made: list[int] = []
        self.position = 0


class Engine:
    """A model with a context of so many sequences."""

    def __init__(self, path: str, num_sequences: int, is_unified: bool, num_threads: int) -> None:
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = num_sequences * CONTEXT_PER_SEQUENCE
        params.n_batch = MAX_BATCH
        params.n_seq_max = num_sequences
        params.kv_unified = is_unified
        params.n_threads = params.n_threads_batch = num_threads
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(MAX_BATCH, 0, 1)
        self._num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self.num_sequences = num_sequences

    def reset(self) -> None:
        lib.llama_memory_clear(self._memory, False)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        sequences = [
            Sequence(row, list(prompt), n) for row, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        assert len(sequences) <= self.num_sequences
        self._share_prefix(sequences)
        live = sequences
        while live:
            self._step(live)
            live = [sequence for sequence in live if sequence.num_left]
        return [sequence.made for sequence in sequences]

    def _share_prefix(self, sequences: list[Sequence]) -> None:
        """Computes what all prompts begin with once, and copies its KV to the others."""
        columns = zip(*(sequence.owed[:-1] for sequence in sequences), strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        if len(sequences) < 2 or common < 16:
            return
        first = Sequence(0, sequences[0].owed[:common], 0)
        while first.owed:
            self._step([first])
        for sequence in sequences:
            if sequence.row:
                lib.llama_memory_seq_cp(self._memory, 0, sequence.row, -1, -1)
            sequence.owed, sequence.position = sequence.owed[common:], common

    def _step(self, live: list[Sequence]) -> None:
        """One llama_decode: single tokens first, then prompts as far as the batch goes."""
        batch, size, ends = self._batch, 0, []
        for sequence in sorted(live, key=lambda sequence: len(sequence.owed) > 1):
            count = min(len(sequence.owed), MAX_BATCH - size)
            if not count:
                break
            for token in sequence.owed[:count]:
                batch.token[size], batch.pos[size] = token, sequence.position
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, sequence.row
                batch.logits[size] = False
                sequence.position += 1
                size += 1
            sequence.owed = sequence.owed[count:]
            if not sequence.owed and sequence.num_left:
                batch.logits[size - 1] = True
                ends.append((size - 1, sequence))
        batch.n_tokens = size
        if code := lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        for place, sequence in ends:
            pointer = lib.llama_get_logits_ith(self._context, place)
            token = int(np.ctypeslib.as_array(pointer, (self._num_vocab,)).argmax())
            sequence.made.append(token)
            sequence.num_left -= 1
            sequence.owed = [token]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--unified", action="store_true", help="one KV buffer for all sequences")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    answer = answers()

    @lib.llama_log_callback
    def silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
        pass

    lib.llama_log_set(silent, ctypes.c_void_p())
    engine = Engine(args.model, args.sequences, args.unified, args.threads)
    serve(answer, engine.generate, engine.reset)


if __name__ == "__main__":
    main()
