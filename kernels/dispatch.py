"""Chooses the implementation of an operation by the device of its first argument.

`PAGEWIRE_KERNELS=reference` in the environment runs every operation on its reference, for bisection; with
`interpreter` the CPU runs the Triton kernels in Triton's interpreter, for tests of them without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

CHOICE_VARIABLE = "PAGEWIRE_KERNELS"
CHOICES = ("auto", "reference", "interpreter")


def choice() -> str:
    """What the environment chooses. Raises ValueError for what is none of CHOICES."""
    chosen = os.environ.get(CHOICE_VARIABLE, "auto")
    if chosen not in CHOICES:
        raise ValueError(f"{CHOICE_VARIABLE} is {chosen!r}: must be one of {', '.join(CHOICES)}")
    return chosen


def is_interpreting() -> bool:
    """Whether tensors of the CPU are for the Triton kernels, in the interpreter."""
    return choice() == "interpreter"


if is_interpreting():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated


class Operation(Generic[P, R]):
    """One operation of the table: its reference, and its implementations by device type.

    Every implementation has the reference's signature, and its first argument is a tensor. A device type without an
    implementation of its own uses that of "cpu", which is plain torch and runs anywhere.
    """

    def __init__(self, reference: Callable[P, R], **implementations: Callable[P, R]) -> None:
        self.reference = reference
        self.implementations = implementations
        self._choice = choice()
        self._on_cpu = self.implementation("cpu")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: torch.Tensor = args[0]  # type: ignore[assignment]
        # A step calls hundreds of operations: asking for the device's name costs as much as a small one.
        return (self._on_cpu if first.is_cpu else self.implementation(first.device.type))(*args, **kwargs)

    def implementation(self, device_type: str) -> Callable[P, R]:
        """What runs on a device type such as "cpu" or "cuda"."""
        if self._choice == "reference":
            return self.reference
        if self._choice == "interpreter" and device_type == "cpu":
            device_type = "cuda"
        return self.implementations.get(device_type) or self.implementations["cpu"]
