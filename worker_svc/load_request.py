"""What a core asks a worker to load, and the loading of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from worker_svc.memory import give_memory_back
from worker_svc.models.loader import LoadedModel, load_model

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load; empty fields mean what the model's files say."""

    model: str
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    max_model_len: int = 0
    force_generic: bool = False
    load_format: str = ""

    def load(self, device: torch.device, on_progress: OnProgress) -> LoadedModel:
        """Loads it on this thread's device."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: where kernels are launched
        started = time.monotonic()
        fields = asdict(self)
        loaded = load_model(fields.pop("model"), device=str(device), on_progress=on_progress, **fields)
        give_memory_back()
        info = loaded.info
        logger.info(
            "loaded %s (%s, %s, %.0f M parameters, %.0f MiB) in %.1f s",
            info.model,
            info.architecture,
            info.dtype,
            info.num_parameters / 1e6,
            info.weights_bytes / 2**20,
            time.monotonic() - started,
        )
        return loaded
