"""The offline sides: each is a process of its own that keeps its model loaded and answers lines of JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.process_group import ProcessGroup, SideError
from bench.workloads import Workload


@dataclass(slots=True)
class Run:
    """One pass over a workload."""

    seconds: float
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True, slots=True)
class Spec:
    """How a side is started."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Side(ProcessGroup):
    """A running side. Raises SideError where it does not start."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.name, spec.command, spec.env, has_pipes=True)
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> Run:
        """One pass with an empty prefix cache. Raises SideError; a wrong number of tokens is one."""
        message = self._ask({"op": "generate", "prompts": workload.prompts, "max_tokens": workload.max_tokens})
        run = Run(message["seconds"], message["token_ids"])
        if [len(ids) for ids in run.token_ids] != workload.max_tokens:
            raise SideError(f"{self.name} gave other numbers of tokens than asked for")
        return run

    def perplexity(self, windows: list[list[int]]) -> float:
        """Of the windows' tokens, each window by itself. Raises SideError where the side has no such operation."""
        return float(self._ask({"op": "perplexity", "prompts": windows, "max_tokens": []})["value"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request, separators=(",", ":")) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SideError(self.last_words()) from error
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(self.last_words())
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise SideError(f"{self.name}: {message['error']}")
        return message

    def _ask_to_quit(self) -> None:
        """The end of its input ends a side."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
