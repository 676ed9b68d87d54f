"""Gets from nothing, or from a lost worker, to a worker with a model and an empty KV pool. Blocking; own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from core_svc.executor import CacheInfo, CacheSpec, ModelSpec
from core_svc.worker_client import GrpcExecutor
from pagewire.engine import ModelInfo
from pagewire.errors import AbortedError, DeadlineExceededError, PagewireError, UnavailableError

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
_TRANSIENT = (UnavailableError, DeadlineExceededError, AbortedError)


@dataclass(frozen=True, slots=True)
class Connection:
    """A worker that is ready for plans."""

    worker_incarnation: str
    model: ModelInfo
    tokenizer_files: Mapping[str, bytes]
    cache: CacheInfo
    epoch: int


class WorkerLink:
    """Makes connections by way of one GrpcExecutor."""

    def __init__(self, executor: GrpcExecutor, target: str, model: ModelSpec, cache: CacheSpec) -> None:
        self._executor = executor
        self._target = target
        self._model = model
        self._cache = cache
        self._stop = threading.Event()
        self._incarnation_logged = ""

    def connect(self, *, after_epoch: int = 0, timeout_s: float | None = None) -> Connection:
        """A connection under an epoch above `after_epoch`, tried again with backoff while the worker is not there.

        Raises UnavailableError with the last reason after `timeout_s` (None: never gives up), and at once what trying
        again would not change (a model that does not exist, a pool that does not fit, another core's worker).
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        delay_s = FIRST_DELAY_S
        reason = ""
        while not self._stop.is_set():
            try:
                return self._try(after_epoch, deadline_s)
            except _TRANSIENT as error:
                if error.message != reason:
                    reason = error.message
                    logger.info("worker %s: %s; trying again", self._target, reason)
            if deadline_s is not None and time.monotonic() + delay_s >= deadline_s:
                raise UnavailableError(
                    f"start-up took longer than {timeout_s:g} s (--startup-timeout-s): worker {self._target}: {reason}"
                )
            self._stop.wait(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        raise UnavailableError("the core shuts down")

    def stop(self) -> None:
        """Makes `connect` give up."""
        self._stop.set()

    def _try(self, after_epoch: int, deadline_s: float | None) -> Connection:
        left_s = float("inf") if deadline_s is None else max(deadline_s - time.monotonic(), 0.1)
        worker = self._executor.handshake(timeout_s=min(5.0, left_s))
        if worker.worker_incarnation != self._incarnation_logged:
            self._incarnation_logged = worker.worker_incarnation
            logger.info("worker %s: incarnation %s on %s", self._target, worker.worker_incarnation, worker.device)
        if deadline_s is not None:
            self._executor.load_timeout_s = max(deadline_s - time.monotonic(), 0.1)
        model = self._executor.load_model(self._model)
        tokenizer_files = self._executor.tokenizer_files()
        epoch = max(after_epoch, worker.epoch) + 1
        cache = self._executor.initialize_cache(self._cache, epoch)
        logger.info(
            "model %s (%s, %s): %d KV blocks of %d tokens, epoch %d",
            model.model,
            model.architecture,
            model.dtype,
            cache.num_blocks - 1,
            self._cache.block_size,
            epoch,
        )
        return Connection(worker.worker_incarnation, model, tokenizer_files, cache, epoch)


def explain(error: BaseException) -> str:
    """An error as one line for the last words of a process."""
    text = error.message if isinstance(error, PagewireError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
