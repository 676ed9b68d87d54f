"""What the sections share: the recorder, the sides that have been started, and how much to measure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bench.alternate import Passes, alternate
from bench.deployments import LABELS, PEER_OF, offline_spec, start_served
from bench.process_group import BUSY_SHARE, SideError
from bench.record import Recorder
from bench.served import Served
from bench.sides import Side
from bench.statistic import ratios
from bench.workloads import Workload

T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """One run of the benchmark. Sides start when they are first needed and stay until the run ends."""

    recorder: Recorder
    peers: frozenset[str]
    repeats: int
    max_seconds: float
    limit: int | None = None
    _offline: dict[str, Side | str] = field(default_factory=dict)
    _served: dict[str, Served | str] = field(default_factory=dict)

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Our sides, and those of the peers that take part."""
        return [name for name in names if PEER_OF.get(name, "") in {"", *self.peers}]

    def offline(self, name: str) -> Side:
        """The side, started where it is not yet. Raises SideError, each time, where it does not start."""
        return _get(self._offline, name, lambda: Side(offline_spec(name)))

    def served(self, name: str) -> Served:
        return _get(self._served, name, lambda: start_served(name))

    def passes(self, sides: Mapping[str, Callable[[], T]], repeats: int | None = None) -> Passes[T]:
        """Alternating passes; a side that turns a core while idle is stopped except during its own."""

        passes = {name: functools.partial(self.awake, name, run) for name, run in sides.items()}
        return alternate(passes, repeats or self.repeats, self.max_seconds)

    def awake(self, name: str, run: Callable[[], T]) -> T:
        """What `run` gives, while the side is not stopped."""
        group = self.served(name) if name.endswith("-served") else self.offline(name)
        group.go_on()
        try:
            return run()
        finally:
            group.rest()

    def warm_up(self, names: Sequence[str], workload: Workload) -> None:
        """A short pass of each side, not counted; one that fails will say so in its rows."""
        short = Workload(workload.name, workload.prompts[:4], [min(n, 8) for n in workload.max_tokens[:4]])
        for name in names:

            def run(name: str = name) -> object:
                if name.endswith("-served"):
                    return self.served(name).load(short, len(short.prompts))
                return self.offline(name).run(short)

            try:
                self.awake(name, run)
            except (SideError, RuntimeError, OSError):
                continue

    def report(
        self, section: str, what: str, unit: str, values: Mapping[str, list[float]], errors: Mapping[str, str]
    ) -> None:
        """A row per side."""
        for name, found in values.items():
            if name in errors or not found:
                self.recorder.fail(f"{section}/{name}", f"{what}: {LABELS[name]}", errors.get(name, "no pass"))
            else:
                self.recorder.add(f"{section}/{name}", f"{what}: {LABELS[name]}", unit, found)

    def compare(
        self,
        section: str,
        what: str,
        pairs: Sequence[tuple[str, str]],
        values: Mapping[str, list[float]],
        *,
        is_time: bool = False,
    ) -> None:
        """A row per pair: how many times faster the first is (is_time: the values are times), pass by pass."""
        for mine, other in pairs:
            if mine not in values or other not in values:
                continue
            key, name = f"{section}/{mine}:{other}", f"{what}: {LABELS[mine]} / {LABELS[other]}"
            first, second = (other, mine) if is_time else (mine, other)
            found = ratios(values[first], values[second])
            if found:
                self.recorder.add(key, name, "x", found)
            else:
                self.recorder.fail(key, name, "one of the two failed")

    def close(self) -> None:
        for group in [*self._offline.values(), *self._served.values()]:
            if not isinstance(group, str):
                group.close()

    def close_served(self, name: str) -> None:
        group = self._served.pop(name, "")
        if not isinstance(group, str):
            group.close()


G = TypeVar("G", Side, Served)


def _get(started: dict[str, G | str], name: str, start: Callable[[], G]) -> G:
    if name not in started:
        try:
            group = start()
        except (SideError, OSError) as error:
            started[name] = str(error)
        else:
            started[name] = group
            if (share := group.check_idle()) > BUSY_SHARE:
                print(f"  ({name} takes {share:.0%} of a core when idle: stopped while others run)", flush=True)
    found = started[name]
    if isinstance(found, str):
        raise SideError(found)
    return found
