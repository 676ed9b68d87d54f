"""The KV pool as a picture."""

from __future__ import annotations

from rich.text import Text

from pagewire.stats import BlockState, CoreDetail
from pagewire.top.data import block_counts
from pagewire.top.format import Glyphs, block_map, count, duration
from pagewire.top.table import rule

BLOCK_STYLES = {
    BlockState.FREE: "dim",
    BlockState.CACHED: "blue",
    BlockState.USED: "green",
    BlockState.SHARED: "magenta",
}


def kv_map(detail: CoreDetail, num_lines: int, width: int, glyphs: Glyphs) -> list[Text]:
    """The KV pool: how many blocks are what, and where."""
    blocks, counts = detail.blocks, block_counts(detail)
    if counts is None:
        return [rule("KV cache", width, glyphs, (f" {count(blocks.num_blocks)} blocks", ""))]
    about = "" if blocks.stride <= 1 else "about "
    parts = [(f" {count(blocks.num_blocks)} blocks of {detail.block_size}:", "")]
    if detail.snapshot_age_ms:
        parts = [(f" {count(blocks.num_blocks)} blocks, ", ""), (f"{duration(detail.snapshot_age_ms)} ago:", "yellow")]
    for state, number in zip(BlockState, (counts.free, counts.cached, counts.used, counts.shared), strict=True):
        mark = f"{glyphs.blocks[state]} {about}{count(number)} {state.name.lower()}"
        parts += [(" ", ""), (mark, BLOCK_STYLES[state])]
    cells = block_map(blocks.states, num_lines * width)
    lines = [rule("KV cache", width, glyphs, *parts)]
    for start in range(0, len(cells), width):
        line = Text(no_wrap=True)
        for state in cells[start : start + width]:
            line.append(glyphs.blocks[state], style=BLOCK_STYLES[state])
        lines.append(line)
    return lines
