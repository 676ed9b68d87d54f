"""The cores of a frontend: each connects and reconnects by itself, all serve one model, and one is chosen per request.

The first core that answers says which model this frontend serves. A core of another model is not used until it serves
the same, or until no core of the first model is left and its own becomes the frontend's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from frontend_svc import balance
from frontend_svc.chat_template import ChatTemplate
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.input_processor import InputProcessor
from frontend_svc.session import CoreSession
from frontend_svc.tickets import RETRY_AFTER_S
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import EngineInfo
from pagewire.errors import PagewireError, ResourceExhaustedError, UnavailableError
from pagewire.stats import CoreConnection

log = logging.getLogger(__name__)
T = TypeVar("T")
Connect = Callable[[], Awaitable[EngineCoreClient]]
"""Makes a connected client; waits and retries by itself."""

OTHER_MODEL_RETRY_S = 5.0
"""A core that can't be used is tried again after so long, or as soon as another one is lost."""


class _Core:
    """One core, connected or not."""

    def __init__(self, name: str, connect: Connect) -> None:
        self.name = name
        self.connect = connect
        self.session: CoreSession | None = None
        self.why_unavailable = "no core is connected yet"
        self.is_leaving = False
        """No longer wanted: it gets nothing new, and is let go when it has nothing left."""
        self.task: asyncio.Task[None] | None = None
        self.retiring: asyncio.Task[None] | None = None


class CorePool:
    """All methods belong to the event loop that runs `run`.

    Args:
        max_tokens_behind: see OutputProcessor.
        off_loop: runs what takes long on a thread.
        on_ready: told whether any core can be used, whenever one comes or goes.
    """

    def __init__(
        self,
        max_tokens_behind: int,
        off_loop: Callable[..., Awaitable[InputProcessor]],
        on_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._max_tokens_behind = max_tokens_behind
        self._off_loop = off_loop
        self._on_ready = on_ready
        self._cores: dict[str, _Core] = {}
        self._inputs: InputProcessor | None = None
        self._founding = asyncio.Lock()
        self._is_running = False
        self._left = asyncio.Event()
        """Set, and made anew, whenever a core is lost."""
        self._has_session = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- which cores there are ----------------------------------------------------------------------------------

    def keep(self, connects: Mapping[str, Connect]) -> None:
        """Says which cores there shall be, by name. One that is left out finishes what it has and gets nothing new."""
        for name, connect in connects.items():
            core = self._cores.get(name)
            if core is None:
                core = self._cores[name] = _Core(name, connect)
                if self._is_running:
                    self._start(core)
            core.is_leaving = False
        for core in self._cores.values():
            if core.name not in connects and not core.is_leaving:
                core.is_leaving = True
                self._let_go_when_idle(core)

    def _start(self, core: _Core) -> None:
        core.task = asyncio.get_running_loop().create_task(self._live(core), name=f"core {core.name}")
        core.task.add_done_callback(lambda task: self._on_end(core, task))

    def _on_end(self, core: _Core, task: asyncio.Task[None]) -> None:
        if self._cores.get(core.name) is core:
            del self._cores[core.name]
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _let_go_when_idle(self, core: _Core) -> None:
        async def let_go(session: CoreSession) -> None:
            await session.wait_idle()
            if core.is_leaving and core.session is session and core.task is not None:
                log.info("core %s is let go", core.name)
                core.task.cancel()

        if core.session is not None:
            core.retiring = asyncio.get_running_loop().create_task(let_go(core.session))
        elif core.task is not None:
            core.task.cancel()
        else:
            del self._cores[core.name]

    async def run(self) -> None:
        """Keeps the cores connected until cancelled. Raises what only a fault of ours can be."""
        self._is_running = True
        for core in list(self._cores.values()):
            self._start(core)
        try:
            await asyncio.shield(self._failed)
        finally:
            self._is_running = False
            tasks = [core.task for core in self._cores.values() if core.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- the life of one ----------------------------------------------------------------------------------------

    async def _live(self, core: _Core) -> None:
        while not core.is_leaving:
            try:
                client = await core.connect()
            except PagewireError as error:
                core.why_unavailable = error.message
                log.warning("cannot use the core %s: %s", core.name, error)
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            left = self._left
            session = await self._admit(core, client)
            if session is not None:
                await self._serve(core, session)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(left.wait(), OTHER_MODEL_RETRY_S)

    async def _admit(self, core: _Core, client: EngineCoreClient) -> CoreSession | None:
        """A session, registered; None, and the client closed, where the core can't be used now."""
        try:
            async with self._founding:
                found = _identity(client.info)
                inputs = self._inputs
                if inputs is None or (found != _identity(inputs.info) and not self.sessions):
                    inputs = await self._off_loop(_make_inputs, client)
                if found != _identity(inputs.info):
                    reason = _difference(found, _identity(inputs.info))
                    if reason != core.why_unavailable:
                        log.error("core %s is not used: %s", core.name, reason)
                    core.why_unavailable = reason
                    await client.close()
                    return None
                self._inputs = inputs
                core.session = CoreSession(client, inputs, self._max_tokens_behind, core.name)
                self._merge_infos()
                return core.session
        except PagewireError as error:
            core.why_unavailable = error.message
            log.warning("cannot use the core %s: %s", core.name, error)
            await client.close()
            return None
        except BaseException:
            await client.close()
            raise

    async def _serve(self, core: _Core, session: CoreSession) -> None:
        info = session.client.info
        log.info("core %s serves %s (incarnation %s)", core.name, info.model.model, info.core_incarnation)
        self._has_session.set()
        error: PagewireError = UnavailableError("the frontend is shutting down")
        try:
            await self._on_ready(True)
            await session.pump()
        except PagewireError as lost:
            log.error("core %s is lost with %d requests: %s", core.name, session.num_requests, lost)
            error = UnavailableError(f"the core was lost: {lost}", retry_after_s=RETRY_AFTER_S, reason="CORE_LOST")
        finally:
            core.session = None
            core.why_unavailable = error.message
            self._merge_infos()
            self._left.set()
            self._left = asyncio.Event()
            session.fail_all(error)
            if not self.sessions:
                self._has_session.clear()
            await self._on_ready(bool(self.sessions))
            await session.close()

    def _merge_infos(self) -> None:
        """What holds whichever core gets a request: the shortest max_model_len, the features that all have."""
        infos = [session.client.info for session in self.sessions]
        if self._inputs is None or not infos:
            return
        features = [name for name in infos[0].features if all(name in info.features for info in infos)]
        shortest = min(info.model.max_model_len for info in infos)
        self._inputs.info = replace(
            infos[0],
            model=replace(infos[0].model, max_model_len=shortest),
            features=tuple(features),
            num_kv_blocks=sum(info.num_kv_blocks * info.block_size for info in infos) // infos[0].block_size,
        )

    # -- using them ---------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[CoreSession]:
        """The cores that are connected."""
        return [core.session for core in self._cores.values() if core.session is not None]

    def connections(self) -> tuple[CoreConnection, ...]:
        """Every core, connected or not, for whoever watches."""
        return tuple(_connection(core) for core in self._cores.values())

    @property
    def inputs(self) -> InputProcessor:
        """Makes requests for any of the cores. Raises UnavailableError while there is none."""
        if self._inputs is None or not self.sessions:
            raise self.unavailable()
        return self._inputs

    @property
    def max_num_requests(self) -> int:
        """Requests that the connected cores take together."""
        return sum(session.client.info.max_num_requests for session in self.sessions)

    def unavailable(self) -> UnavailableError:
        """Why no core can be used."""
        reasons = dict.fromkeys(core.why_unavailable for core in self._cores.values() if core.session is None)
        return UnavailableError("; ".join(reasons) or "there is no core", retry_after_s=RETRY_AFTER_S)

    def choose(self, inputs: InputProcessor, key: bytes, n: int, besides: CoreSession | None = None) -> CoreSession:
        """The core for a request that `inputs` made, with this prefix key and `n` completions; not `besides`.

        Raises:
            UnavailableError: no core of that model is connected.
            ResourceExhaustedError: none that is connected has room.
        """
        all_of_them = [core for core in self._cores.values() if core.session is not None]
        staying = [core.session for core in all_of_them if not core.is_leaving] or [c.session for c in all_of_them]
        usable = [s for s in staying if s is not None and s is not besides and s.inputs is inputs]
        if not usable:
            raise self.unavailable()
        with_room = [session for session in usable if session.has_room(n)]
        if not with_room:
            raise ResourceExhaustedError(
                f"each of {len(usable)} cores holds as many requests as it takes", retry_after_s=RETRY_AFTER_S
            )
        willing = [session for session in with_room if not session.is_refusing]
        return balance.choose(willing or with_room, key)

    async def wait_ready(self) -> None:
        """Waits until a core is connected."""
        await self._has_session.wait()


def _connection(core: _Core) -> CoreConnection:
    if core.session is None:
        return CoreConnection(core.name, error=core.why_unavailable)
    info = core.session.client.info
    return CoreConnection(core.name, True, info.core_incarnation, info.model.model, core.session.num_requests)


def _make_inputs(client: EngineCoreClient) -> InputProcessor:
    tokenizer = Tokenizer(client.tokenizer_files)
    return InputProcessor(client.info, tokenizer, ChatTemplate(client.tokenizer_files, tokenizer))


def _identity(info: EngineInfo) -> dict[str, object]:
    """What must be the same for output to be the same whichever core makes it."""
    names = ("weights_id", "tokenizer_sha256", "dtype", "quantization", "kv_cache_dtype", "vocab_size", "eos_token_ids")
    return {name: getattr(info.model, name) for name in names}


def _difference(found: Mapping[str, object], served: Mapping[str, object]) -> str:
    pairs = [f"{name} is {found[name]!r} and not {served[name]!r}" for name in served if found[name] != served[name]]
    return f"it serves another model than the other cores: {', '.join(pairs)}"
