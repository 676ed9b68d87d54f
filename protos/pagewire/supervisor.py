"""Child processes of `pagewire serve`: start and wait until ready, notice a death, stop in order, leave none behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from pagewire.errors import UnavailableError
from pagewire.runtime.lifetime import SUPERVISOR_VARIABLE
from pagewire.runtime.ready import Ready, parse_ready

KILL_AFTER_S = 2.0
"""How long a process gets after SIGTERM where another one has died already."""


GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""gRPC's core polls sockets with threads of its own ("event engine") and hands what they find to the thread that waits
for it. Processes that share few processors with the kernels pay for each such hop with cold caches: without it, the
thread that waits polls. Measured on two processors, SmolLM2-135M in bfloat16, one stream, three processes, in turns:
0.5 to 1.0 ms less per token, of 20; 5 to 10 % less processor time per token in the frontend. A version of gRPC that
does not know these names says so in one line and goes on.
"""
DRAIN_ORDER = ("frontend", "core", "worker")
"""Each is stopped before the one that it needs."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a service process of the group gets; what the user has set stays."""
    return {"GRPC_EXPERIMENTS": GRPC_EXPERIMENTS, **environ, SUPERVISOR_VARIABLE: str(os.getpid())}


class Child:
    """One service process. It has its own session, so that Ctrl-C reaches the supervisor alone."""

    def __init__(self, service: str, process: asyncio.subprocess.Process) -> None:
        self.service = service
        self._process = process
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.ensure_future(self._read_stdout())
        self.exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, service: str, arguments: Sequence[str]) -> Child:
        """Starts `python -m <service>_svc` with the arguments."""
        environ = child_environment(os.environ)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{service}_svc",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        return cls(service, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            ready = parse_ready(text)
            if ready is not None and not self.ready.done():
                self.ready.set_result(ready)
            elif text:
                print(text, file=sys.stderr)

    @property
    def how_it_ended(self) -> str:
        """Such as `the core (pid 42) was killed by SIGKILL`."""
        code = self._process.returncode
        name = f"the {self.service} (pid {self.pid})"
        if code is None:
            return f"{name} runs"
        if code >= 0:
            return f"{name} ended with exit status {code}"
        try:
            return f"{name} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"{name} was killed by signal {-code}"

    async def wait_ready(self, timeout_s: float) -> Ready:
        """Waits for the ready line. Raises UnavailableError where the process ends or the time is over."""
        await asyncio.wait((self.ready, self.exited), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.ready.done():
            return self.ready.result()
        if self.exited.done():
            raise UnavailableError(f"{self.how_it_ended} before it was ready; its messages are above")
        raise UnavailableError(
            f"the {self.service} was not ready within {timeout_s:g} s; its messages above say what it was at. "
            "A slow download or disk may need more: --startup-timeout-s"
        )

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL `grace_s` seconds later; True if it ended by itself with status 0."""
        if not self.exited.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait((self.exited,), timeout=grace_s)
        if not self.exited.done():
            self._signal(signal.SIGKILL)
            await self.exited
        await self._reader
        return self._process.returncode == 0

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(which)


class Group:
    """The children."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    async def launch(self, service: str, arguments: Sequence[str]) -> Child:
        """Starts a service and does not wait."""
        child = await Child.start(service, arguments)
        self.children.append(child)
        return child

    async def wait_ready(self, child: Child, timeout_s: float) -> Ready:
        """Waits until a child is ready, or until any child ends (UnavailableError)."""
        ready = asyncio.ensure_future(child.wait_ready(timeout_s))
        death = asyncio.ensure_future(self.wait_for_death())
        try:
            await asyncio.wait((ready, death), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise UnavailableError(f"{death.result().how_it_ended} while the {child.service} started")
            return ready.result()
        finally:
            for task in (ready, death):
                task.cancel()
            await asyncio.gather(ready, death, return_exceptions=True)

    async def wait_for_death(self) -> Child:
        """The first child that ends."""
        await asyncio.wait([child.exited for child in self.children], return_when=asyncio.FIRST_COMPLETED)
        return next(child for child in self.children if child.exited.done())

    async def drain(self, grace_s: float) -> bool:
        """Stops the children one by one, from the frontend on; True if each ended well within `grace_s` seconds."""
        order = sorted(self.children, key=lambda child: DRAIN_ORDER.index(child.service))
        results = [await child.stop(grace_s) for child in order]
        return all(results)

    async def kill(self, grace_s: float = KILL_AFTER_S) -> None:
        """Stops all at once."""
        await asyncio.gather(*(child.stop(grace_s) for child in self.children))
