"""Chooses the implementation of an operation by the device of its first argument.

`PAGEWIRE_KERNELS=reference` in the environment runs every operation on its reference, for bisection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

CHOICE_VARIABLE = "PAGEWIRE_KERNELS"


class Operation(Generic[P, R]):
    """One operation of the table: its reference, and its implementations by device type.

    Every implementation has the reference's signature, and its first argument is a tensor. A device type without an
    implementation of its own uses that of "cpu", which is plain torch and runs anywhere. Raises ValueError where
    PAGEWIRE_KERNELS has another value than "reference" or "auto".
    """

    def __init__(self, reference: Callable[P, R], **implementations: Callable[P, R]) -> None:
        self.reference = reference
        self.implementations = implementations
        choice = os.environ.get(CHOICE_VARIABLE, "auto")
        if choice not in ("auto", "reference"):
            raise ValueError(f"{CHOICE_VARIABLE} is {choice!r}: must be auto or reference")
        self._is_reference_forced = choice == "reference"
        self._on_cpu = self.implementation("cpu")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: torch.Tensor = args[0]  # type: ignore[assignment]
        # A step calls hundreds of operations: asking for the device's name costs as much as a small one.
        return (self._on_cpu if first.is_cpu else self.implementation(first.device.type))(*args, **kwargs)

    def implementation(self, device_type: str) -> Callable[P, R]:
        """What runs on a device type such as "cpu" or "cuda"."""
        if self._is_reference_forced:
            return self.reference
        return self.implementations.get(device_type) or self.implementations["cpu"]
