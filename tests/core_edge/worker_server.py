"""A WorkerService for tests of the core's edge: real gRPC around FakeExecutor, and switches for every way to fail.

Also a process of its own: `python worker_server.py` prints its port and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from core_svc.executor import CacheSpec
from core_svc.fake_executor import FakeExecutor
from core_svc.fake_model import FakeModel
from pagewire.columns import pack_int32, unpack_int32
from pagewire.engine import ModelInfo
from pagewire.errors import AbortedError, FailedPreconditionError, PagewireError, UnavailableError
from pagewire.plan import NewRequest, StepPlan, StepResult
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.server import GrpcServer
from pagewire.sampling_wire import sampling_params_from_proto
from pagewire.types_wire import model_info_to_proto, tokenizer_chunks, tokenizer_sha256
from pagewire.v1 import core_pb2, types_pb2, worker_pb2, worker_pb2_grpc

MODEL = FakeModel()
TOKENIZER_FILES = {"tokenizer.json": b"{}" * 300_000, "chat_template.jinja": b"{{ messages }}"}


def model_info(max_model_len: int = 2_000_000) -> ModelInfo:
    return ModelInfo(
        model="scripted",
        architecture="ScriptedForCausalLM",
        dtype="float32",
        kv_cache_dtype="float32",
        tokenizer_sha256=tokenizer_sha256(TOKENIZER_FILES),
        weights_id="w1",
        vocab_size=MODEL.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(MODEL.eos_token_id,),
    )


def expected_tokens(request: core_pb2.EngineRequest) -> list[int]:
    """What a request must produce, up to its max_tokens."""
    params = sampling_params_from_proto(request.sampling_params)
    prompt = unpack_int32(request.prompt_token_ids).tolist()
    return MODEL.generate(prompt, params, params.max_tokens or 0)


def plan_from_proto(message: worker_pb2.StepPlan) -> StepPlan:
    """The plan as it arrived."""
    columns = {
        name: unpack_int32(getattr(message, name))
        for name in (
            "slots",
            "num_scheduled_tokens",
            "num_computed_tokens",
            "num_sampled_tokens",
            "num_new_blocks",
            "new_block_ids",
            "released_slots",
            "num_draft_tokens",
            "draft_token_ids",
            "zero_block_ids",
        )
    }
    new_requests = [
        NewRequest(
            new.slot,
            new.frontend_incarnation,
            new.request_id,
            unpack_int32(new.token_ids),
            new.num_prompt_tokens,
            sampling_params_from_proto(new.sampling_params),
        )
        for new in message.new_requests
    ]
    return StepPlan(epoch=message.epoch, step=message.step, new_requests=new_requests, **columns)


def result_to_proto(result: StepResult) -> worker_pb2.StepResult:
    """A result without log-probabilities."""
    return worker_pb2.StepResult(
        epoch=result.epoch,
        step=result.step,
        slots=pack_int32(result.slots),
        num_tokens=pack_int32(result.num_tokens),
        token_ids=pack_int32(result.token_ids),
    )


@dataclass
class Script:
    """How the worker behaves; changed by tests while it runs."""

    step_s: float = 0.0
    """How long a step takes."""
    heartbeat_s: float = 0.0
    """Interval of heartbeats while a step runs; 0: none."""
    is_progressing: bool = True
    """Whether heartbeats tell of progress."""
    num_kv_blocks: int = 4096
    load_s: float = 0.0
    load_error: PagewireError | None = None
    step_error: PagewireError | None = None
    """Fails the next step, in band; it has not happened then."""
    break_stream: bool = False
    """Ends the Execute stream at the next plan."""
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Steps wait while it is cleared."""
    model: ModelInfo = field(default_factory=model_info)
    plans: list[worker_pb2.StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hold.set()


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Refuses fenced cores, wrong epochs and gaps, as a real worker does."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.incarnation = new_incarnation()
        self.versions = types_pb2.ProtocolVersions(min=1, max=1)
        self.world_size = 1
        self.core = ""
        self.epoch = 0
        self.next_step = 1
        self.has_failed = False
        self.sleep_level = 0
        self.num_loads = 0
        self.executor = FakeExecutor(2, model=MODEL, epoch=0)
        self._counter = 0

    def check(self, core_incarnation: str) -> None:
        if core_incarnation != self.core:
            raise FailedPreconditionError("another core has this worker", reason="FENCED")

    async def Handshake(self, request: Any, context: Any) -> Any:
        self.core = request.core_incarnation
        return worker_pb2.WorkerServiceHandshakeResponse(
            worker_incarnation=self.incarnation,
            protocol_versions=self.versions,
            world_size=self.world_size,
            device="cpu",
            epoch=self.epoch,
            step=self.next_step - 1,
        )

    async def LoadModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.check(request.core_incarnation)
        self.num_loads += 1
        yield worker_pb2.LoadModelResponse(stage="reading weights", fraction=0.25)
        await asyncio.sleep(self.script.load_s)
        if self.script.load_error is not None:
            raise self.script.load_error
        yield worker_pb2.LoadModelResponse(fraction=1.0, model=model_info_to_proto(self.script.model))

    async def InitializeCache(self, request: Any, context: Any) -> Any:
        self.check(request.core_incarnation)
        if request.epoch <= self.epoch:
            raise FailedPreconditionError(f"epoch {request.epoch} is not above {self.epoch}")
        self.epoch, self.next_step = request.epoch, 1
        spec = CacheSpec(
            block_size=request.block_size,
            num_blocks=request.num_blocks or self.script.num_kv_blocks,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens,
        )
        cache = self.executor.initialize_cache(spec, request.epoch)
        return worker_pb2.InitializeCacheResponse(
            num_blocks=cache.num_blocks, bytes_per_block=1024, kv_cache_dtype=types_pb2.DATA_TYPE_FLOAT32
        )

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        opened = (await anext(request_iterator)).open
        self.check(opened.core_incarnation)
        if opened.epoch != self.epoch:
            raise FailedPreconditionError(f"epoch {opened.epoch} is not {self.epoch}")
        yield worker_pb2.ExecuteResponse(
            opened=worker_pb2.ExecuteResponse.Opened(worker_incarnation=self.incarnation, next_step=self.next_step)
        )
        async for message in request_iterator:
            self.check(opened.core_incarnation)
            if self.script.break_stream:
                self.script.break_stream = False
                raise UnavailableError("the stream broke")
            async for _ in self._work():
                yield worker_pb2.ExecuteResponse(heartbeat=types_pb2.Heartbeat(worker_progress=self._counter))
            yield worker_pb2.ExecuteResponse(result=self._run(message.plan))

    async def _work(self) -> AsyncIterator[None]:
        """Takes as long as the script says; yields at each heartbeat."""
        script, left_s = self.script, self.script.step_s
        while left_s > 0 or not script.hold.is_set():
            nap_s = script.heartbeat_s or 0.02
            await asyncio.sleep(min(nap_s, left_s) if left_s > 0 else nap_s)
            left_s -= nap_s
            self._counter += script.is_progressing
            if script.heartbeat_s:
                yield

    def _run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        if self.has_failed and (plan.epoch, plan.step) == (self.epoch, self.next_step + 1):
            return _failure(plan, AbortedError("the step before it failed"))
        self.has_failed = False
        if (plan.epoch, plan.step) != (self.epoch, self.next_step):
            raise FailedPreconditionError(f"{(plan.epoch, plan.step)} is not {(self.epoch, self.next_step)}")
        if self.script.step_error is not None:
            error, self.script.step_error = self.script.step_error, None
            self.has_failed = True
            return _failure(plan, error)
        self.next_step += 1
        self.script.plans.append(plan)
        return result_to_proto(self.executor.submit(plan_from_proto(plan)).result())

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.check(request.core_incarnation)
        for chunk in tokenizer_chunks(TOKENIZER_FILES):
            yield worker_pb2.WorkerServiceGetTokenizerResponse(chunk=chunk)

    async def Utility(self, request: Any, context: Any) -> Any:
        self.check(request.core_incarnation)
        response = worker_pb2.WorkerServiceUtilityResponse
        match request.WhichOneof("command"):
            case "sleep":
                self.sleep_level = request.sleep.level
                self.executor.sleep(request.sleep.level)
                return response(sleep=response.Sleep(freed_bytes=123))
            case "wake_up":
                self.sleep_level = 0
                return response(wake_up=response.WakeUp())
            case "profile":
                return response(profile=response.Profile(path="profile.json"))
        raise FailedPreconditionError("not scripted")


def _failure(plan: worker_pb2.StepPlan, error: PagewireError) -> worker_pb2.StepResult:
    failure = worker_pb2.StepResult.StepFailure(code=grpc.StatusCode[error.code].value[0], message=error.message)
    return worker_pb2.StepResult(epoch=plan.epoch, step=plan.step, failure=failure)


class ScriptedWorker:
    """The server around it."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.script = script or Script()
        self.servicer = WorkerServicer(self.script)
        self._server = GrpcServer(["pagewire.v1.WorkerService"], port=port)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self._server.aio)

    async def start(self) -> str:
        """Listens; returns the address."""
        return f"127.0.0.1:{await self._server.start()}"

    async def stop(self) -> None:
        self.script.hold.set()
        await self._server.drain(0)


async def _serve() -> None:
    worker = ScriptedWorker()
    worker.script.step_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    print(await worker.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
