"""The settings of a core process."""

from __future__ import annotations

from dataclasses import dataclass, fields

from core_svc.config import POLICIES, EngineConfig
from core_svc.executor import CacheSpec, ModelSpec
from core_svc.logprob_room import BYTES_PER_CANDIDATE
from core_svc.trace_observer import DEFAULT_STEP_INTERVAL
from pagewire.runtime.settings import CommonSettings, parse_bytes, setting

_DTYPES = ("", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CoreSettings(CommonSettings):
    """The scheduler between frontends and a worker: takes requests, plans steps, sends outputs."""

    port: int = setting(50052, help="port to listen on; 0 takes a free one", low=0, high=65535)
    worker: str = setting("127.0.0.1:50053", help="address of the worker", metavar="HOST:PORT")
    model: str = setting("", help="alias, directory, GGUF file or hub id; empty: what the worker was started with")
    revision: str = setting("", help="revision of the model on the hub")
    dtype: str = setting("", help="type of weights and activations; empty: the worker's choice", choices=_DTYPES)
    quantization: str = setting(
        "",
        help="int8: 8-bit weights and activations; gguf: the GGUF file's own blocks; empty: weights of --dtype",
        choices=("", "int8", "gguf"),
    )
    max_model_len: int = setting(0, help="longest sequence in tokens; 0: the model's own limit", low=0)
    force_generic: bool = setting(False, help="use the generic model path even for known architectures")
    load_format: str = setting("", help="format of the weights; dummy makes random ones")
    block_size: int = setting(16, help="tokens per KV block", low=1, high=1024)
    num_kv_blocks: int = setting(0, help="KV blocks; 0: as many as the memory takes", low=0)
    kv_cache_memory_bytes: int = setting(
        0, help="memory for the KV pool; 0: the worker's budget", low=0, metavar="BYTES", parse=parse_bytes
    )
    kv_cache_dtype: str = setting("", help="type of the KV cache; empty: that of activations")
    max_num_seqs: int = setting(128, help="most requests that run at once", low=1)
    max_num_batched_tokens: int = setting(2048, help="token budget of a step", low=1)
    long_prefill_token_threshold: int = setting(0, help="most tokens of a request in a step; 0: no limit", low=0)
    policy: str = setting("fcfs", help="order of requests", choices=POLICIES)
    enable_prefix_caching: bool = setting(True, help="share KV blocks among equal prefixes")
    max_num_requests: int = setting(4096, help="most requests held, running and waiting; more are refused", low=1)
    prefill_schedule_interval: int = setting(1, help="prefills get a turn every so many steps while decodes run", low=1)
    async_scheduling: bool = setting(
        True, help="plan the next step while one runs, so that the worker never waits; output is the same"
    )
    log_requests: bool = setting(False, help="log one line per request and step")
    trace_step_interval: int = setting(
        DEFAULT_STEP_INTERVAL,
        help="a traced request has its first so many steps traced, and then every one of so many; 1 traces all",
        low=1,
        metavar="STEPS",
    )
    startup_timeout_s: float = setting(
        600.0, help="seconds that worker and model get at start-up", low=0.1, metavar="SECONDS"
    )
    worker_silence_s: float = setting(
        4.0, help="seconds without a sign of life in a step until a worker counts as lost", low=0.1, metavar="SECONDS"
    )
    step_limit_s: float = setting(
        60.0, help="seconds without progress in a step until readiness is withdrawn", low=0.1, metavar="SECONDS"
    )
    lease_ms: int = setting(5000, help="milliseconds that a frontend's stream may stay broken", low=1, metavar="MS")
    heartbeat_interval_ms: int = setting(1000, help="time between heartbeats to frontends", low=10, metavar="MS")
    output_buffer_bytes: int = setting(
        256 * 2**20,
        help="outputs that may wait for a frontend before it is dropped",
        low=1024,
        metavar="BYTES",
        parse=parse_bytes,
    )

    def engine_config(self) -> EngineConfig:
        """How the engine schedules."""
        names = {field.name for field in fields(EngineConfig)}
        return EngineConfig(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name in names},
            # Half of a message: the rest is for everything else in it.
            max_logprob_candidates=max(self.max_message_bytes // 2 // BYTES_PER_CANDIDATE, 1),
        )

    def model_spec(self) -> ModelSpec:
        """What the worker loads."""
        return ModelSpec(**{field.name: getattr(self, field.name) for field in fields(ModelSpec)})

    def cache_spec(self) -> CacheSpec:
        """How the worker makes the pool. The null block comes on top of `num_kv_blocks`."""
        return CacheSpec(
            block_size=self.block_size,
            num_blocks=self.num_kv_blocks + 1 if self.num_kv_blocks else 0,
            memory_bytes=self.kv_cache_memory_bytes,
            kv_cache_dtype=self.kv_cache_dtype,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
