"""`pagewire serve` hands settings to its processes so that the documented precedence holds in them."""

from __future__ import annotations

import pytest

from core_svc.settings import CoreSettings
from pagewire.runtime.settings import parse_settings
from pagewire.serve import ServeSettings, arguments_for


def max_num_seqs(*argv: str, **environ: str) -> int:
    """What a core ends up with under `pagewire serve`; 128 is the default."""
    sources: dict[str, str] = {}
    settings = parse_settings(ServeSettings, "serve", argv, environ=environ, sources=sources)
    arguments = arguments_for("core", settings, sources)
    return parse_settings(CoreSettings, "core", arguments, environ=environ).max_num_seqs


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, 128),
        (["--max-num-seqs=5"], {"PAGEWIRE_CORE_MAX_NUM_SEQS": "6", "PAGEWIRE_MAX_NUM_SEQS": "7"}, 5),
        (["--max-num-seqs=128"], {"PAGEWIRE_CORE_MAX_NUM_SEQS": "6"}, 128),
        ([], {"PAGEWIRE_SERVE_MAX_NUM_SEQS": "8", "PAGEWIRE_CORE_MAX_NUM_SEQS": "6"}, 8),
        ([], {"PAGEWIRE_CORE_MAX_NUM_SEQS": "6", "PAGEWIRE_MAX_NUM_SEQS": "7"}, 6),
        ([], {"PAGEWIRE_MAX_NUM_SEQS": "7"}, 7),
    ],
)
def test_precedence_under_serve(argv, environ, expected):
    assert max_num_seqs(*argv, **environ) == expected


def test_the_frontend_always_gets_its_address_and_the_worker_its_model():
    """They were checked and fetched before anything starts."""
    assert arguments_for("frontend", ServeSettings(), {}) == ["--lame-duck-s=0", "--host=127.0.0.1", "--port=50051"]
    assert arguments_for("worker", ServeSettings(), {}) == ["--lame-duck-s=0", "--model=smollm2"]
