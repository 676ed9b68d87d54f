"""Text in, text out. No torch, no scheduling.

`LLM` joins the three services in one process; it loads them only when it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frontend_svc.llm import LLM
    from frontend_svc.outputs import CompletionOutput, Logprob, RequestOutput
    from pagewire.engine import FinishReason
    from pagewire.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "FinishReason", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "frontend_svc.llm",
    "CompletionOutput": "frontend_svc.outputs",
    "FinishReason": "pagewire.engine",
    "Logprob": "frontend_svc.outputs",
    "RequestOutput": "frontend_svc.outputs",
    "SamplingParams": "pagewire.sampling",
}


def __getattr__(name: str) -> Any:
    # Importing the package must stay light: a frontend process needs none of these.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
