"""torch's profiler, started and stopped by a utility call."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pagewire.errors import FailedPreconditionError


class Profiler:
    """One trace at a time, written to $PAGEWIRE_PROFILE_DIR or the system's temporary folder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: Any = None
        self._path = ""

    def start(self) -> str:
        """Starts; returns the file that the trace will be written to."""
        if self._running is not None:
            raise FailedPreconditionError("the profiler runs already", reason="PROFILER_RUNNING")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        folder = Path(os.environ.get("PAGEWIRE_PROFILE_DIR") or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        self._path = str(folder / f"pagewire-worker-{os.getpid()}-{time.time_ns()}.json")
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()
        return self._path

    def stop(self) -> str:
        """Stops and writes the trace; returns its file."""
        if self._running is None:
            raise FailedPreconditionError("the profiler does not run", reason="PROFILER_NOT_RUNNING")
        profiler, self._running = self._running, None
        profiler.stop()
        profiler.export_chrome_trace(self._path)
        return self._path
