"""A GPU that is lost: after an illegal access, say, every later call fails until a new process begins.

Such an error may come from any call after the one that caused it: from the wait for a step, or from the launch of the
next one, where it looks like an error of that launch alone.
"""

from __future__ import annotations

import torch

from pagewire.errors import InternalError


class DeviceLostError(InternalError):
    """The device fails, and will in every later step too."""

    reason = "DEVICE_LOST"

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the device failed: {type(error).__name__}: {error}")


def is_lost(device: torch.device) -> bool:
    """Whether a GPU does not get to the end of its work; waits for it. Memory that ran out, say, loses none."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
