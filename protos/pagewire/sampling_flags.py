"""Sampling parameters as command line flags."""

from __future__ import annotations

import argparse
from typing import Any

_FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "most tokens of the answer"),
    ("temperature", float, "0 is greedy, 1 is the model's own distribution"),
    ("top_k", int, "sample among the k likeliest tokens"),
    ("top_p", float, "sample among the likeliest tokens that make up this probability"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("repetition_penalty", float, "above 1 discourages tokens seen before"),
    ("presence_penalty", float, "above 0 discourages tokens of the answer"),
    ("frequency_penalty", float, "above 0 discourages them by how often they came"),
    ("min_tokens", int, "least tokens before any stop counts"),
    ("seed", int, "same seed, same answer"),
    ("n", int, "number of answers"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; what is not given stays unset."""
    group = parser.add_argument_group("sampling")
    for name, kind, help_text in _FLAGS:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS, help=help_text)
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, help="end where this text appears")
    group.add_argument(
        "--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on past the model's end"
    )


def sampling_from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for the client's calls."""
    names = [name for name, _, _ in _FLAGS] + ["stop", "ignore_eos"]
    found = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if "stop" in found:
        found["stop"] = tuple(found["stop"])
    return found
