"""Rows of a packed weight, gathered: the embedding, where it is the output matrix too."""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.call import SharedCall
from kernels.cpu.vectors import get_int32, get_int64, put_int32

ROWS_PER_CHUNK = 8


@jit.chunks
def _gather_chunk(args, chunk):  # type: ignore[no-untyped-def]
    ids, num_ids, weight = get_int64(args), get_int64(args + 8), get_int64(args + 16)
    panel_bytes, words, out = get_int64(args + 24), get_int64(args + 32), get_int64(args + 40)
    for i in range(chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, num_ids)):
        row = get_int64(ids + 8 * i)
        source, target = weight + row // 32 * panel_bytes + row % 32 * 4, out + i * words * 4
        for word in range(words):
            put_int32(target + 4 * word, get_int32(source + 128 * word))


_gather = SharedCall(_gather_chunk, 6)


def gather(ids: int, num_ids: int, weight: int, panel_bytes: int, words: int, out: int) -> None:
    """Copies rows of 4-byte words (a float32, or two 16-bit numbers) to out; all but the counts are addresses.

    A panel holds word after word, each of 32 rows. ids are int64 and within the weight.
    """
    _gather(-(-num_ids // ROWS_PER_CHUNK), ids, num_ids, weight, panel_bytes, words, out)
