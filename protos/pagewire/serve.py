"""`pagewire serve`: frontend, core and worker as three processes on this machine, from a model's name to an answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.client import AsyncClient
from pagewire.errors import InvalidArgumentError, PagewireError, UnauthenticatedError, UnavailableError
from pagewire.runtime.log_levels import SYNTAX, checked_levels
from pagewire.runtime.logs import FORMATS, setup_logging
from pagewire.runtime.ready import Ready
from pagewire.runtime.server import wait_for_signal
from pagewire.runtime.settings import parse_bytes, parse_settings, setting
from pagewire.runtime.transport import TlsConfig
from pagewire.supervisor import Group

DESCRIPTION = """Serve a model on this machine: fetches it where needed, starts worker, core and frontend as three
processes, waits until they are healthy, streams one answer to the terminal, and serves until Ctrl-C. Flags that are
left out do not reach a process, so that its own variables (PAGEWIRE_CORE_..., see `pagewire core --help`) count, except
model, host and port: only serve's own, or those of all, are read."""

_TLS = ("tls_ca_file", "tls_cert_file", "tls_key_file")
_PASSED_ON = {
    "worker": (
        "model",
        "device",
        "kv_cache_memory",
        "gpu_memory_utilization",
        "cuda_graphs",
        "num_threads",
        "log_level",
        "log_format",
        "drain_s",
        "max_message_bytes",
        *_TLS,
    ),
    "core": (
        "dtype",
        "quantization",
        "max_model_len",
        "force_generic",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "policy",
        "enable_prefix_caching",
        "async_scheduling",
        "log_requests",
        "log_level",
        "log_format",
        "drain_s",
        "startup_timeout_s",
        "max_message_bytes",
        *_TLS,
    ),
    "frontend": (
        "host",
        "port",
        "api_keys_file",
        "log_requests",
        "log_level",
        "log_format",
        "drain_s",
        "max_message_bytes",
        *_TLS,
    ),
}


@dataclass(frozen=True)
class ServeSettings:
    """Settings of the group; most are handed to the process that they concern."""

    model: str = setting("smollm2", help="alias, local directory, local .gguf file, or hub id")
    host: str = setting("127.0.0.1", help="address that the frontend listens on; 0.0.0.0 is every interface")
    port: int = setting(50051, help="the frontend's port; 0 takes a free one", low=0, high=65535)
    device: str = setting("cpu", help="where to compute: cpu, cuda or cuda:<index>")
    dtype: str = setting("", help="float32, bfloat16 or float16; empty: the worker's choice for model and device")
    quantization: str = setting(
        "",
        help="int8: 8-bit weights and activations; gguf: run a GGUF file's own blocks; empty: weights of --dtype",
        choices=("", "int8", "gguf"),
    )
    max_model_len: int = setting(0, help="longest sequence in tokens; 0: the model's own limit", low=0)
    kv_cache_memory: int = setting(
        0, help="memory for the KV cache, such as 4GiB; 0: found out", low=0, metavar="BYTES", parse=parse_bytes
    )
    gpu_memory_utilization: float = setting(
        0.9, help="share of a GPU's memory that the worker may fill", low=0.01, high=1
    )
    cuda_graphs: bool = setting(True, help="on CUDA, launch a decode step's kernels as one recorded graph")
    max_num_seqs: int = setting(128, help="most requests that run at once", low=1)
    max_num_batched_tokens: int = setting(2048, help="most tokens that one step computes", low=1)
    long_prefill_token_threshold: int = setting(0, help="most prompt tokens per request and step; 0: no limit", low=0)
    policy: str = setting("fcfs", help="who is served first", choices=("fcfs", "priority"))
    enable_prefix_caching: bool = setting(True, help="reuse the KV of equal prompt beginnings")
    async_scheduling: bool = setting(True, help="plan the next step while one runs; output is the same")
    block_size: int = setting(16, help="tokens per KV block", low=1, high=1024)
    force_generic: bool = setting(False, help="run the model through transformers' code even where ours knows it")
    num_threads: int = setting(0, help="threads of a computation on the CPU; 0: one per core", low=0)
    log_requests: bool = setting(False, help="log a line per ended request, and one per request and step")
    log_level: str = setting(
        "info",
        help="how much the processes log to this terminal, such as info,core_svc.steps=debug",
        metavar=SYNTAX,
        parse=checked_levels,
    )
    log_format: str = setting(
        "auto", help="form of log lines; auto: json in a container whose log is no terminal", choices=FORMATS
    )
    max_message_bytes: int = setting(
        64 * 2**20, help="largest gRPC message", low=1024, high=2**31 - 1, metavar="BYTES", parse=parse_bytes
    )
    startup_timeout_s: float = setting(600.0, help="seconds that each process gets to start", low=1, metavar="SECONDS")
    drain_s: float = setting(30.0, help="seconds that running requests get after Ctrl-C", low=0, metavar="SECONDS")
    tls_ca_file: str = setting("", help="PEM file to check the other side against, between all processes and callers")
    tls_cert_file: str = setting("", help="PEM file with a certificate that names 127.0.0.1 (and --host)")
    tls_key_file: str = setting("", help="PEM file with that certificate's key")
    api_keys_file: str = setting("", help="file of the keys that callers need, lines name:key")
    demo: bool = setting(True, help="stream one answer to the terminal when everything is up")
    demo_prompt: str = setting("In one sentence: what is the sea made of?", help="what that answer is about")

    @property
    def tls(self) -> TlsConfig | None:
        """How this process speaks to the frontend; None: in the clear."""
        files = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        return TlsConfig(*files) if any(files) else None


def arguments_for(service: str, settings: ServeSettings, sources: Mapping[str, str]) -> list[str]:
    """The flags of one process: what was given to `pagewire serve`, by flag or by variable of its own.

    Not what comes from a variable of all (`sources` says): the process reads that itself, after its own variables.
    """
    # Nobody balances load among the processes of one group: there is no one to tell, and nothing to wait for.
    found = ["--lame-duck-s=0"]
    for field in dataclasses.fields(settings):
        value, source = getattr(settings, field.name), sources.get(field.name, "")
        is_given = source.startswith(("--", "PAGEWIRE_SERVE_"))
        always = field.name in ("host", "port", "model")
        if field.name not in _PASSED_ON[service] or not (is_given or always):
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found.append(f"--{flag}={value}")
    return found


def fetch(model: str) -> None:
    """Has the model's files there before anything starts, with a progress bar. Raises UnavailableError."""
    done = subprocess.run([sys.executable, "-m", "worker_svc.fetch", model], stdout=subprocess.PIPE)
    if done.returncode != 0:
        raise UnavailableError(f"the model {model!r} could not be had; the message is above")


def check_address(host: str, port: int) -> None:
    """Tells before the model is loaded where the frontend could not listen. Raises UnavailableError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose others with --host and --port (0 takes a free port)"
        ) from error


async def start_all(group: Group, settings: ServeSettings, sources: Mapping[str, str]) -> list[Ready]:
    """Starts worker and frontend at once, and the core when the worker is ready; the frontend waits for the core."""
    timeout_s = settings.startup_timeout_s
    with reserved_port() as core_port:
        worker_child = await group.launch("worker", ["--port=0", *arguments_for("worker", settings, sources)])
        frontend_arguments = [f"--core=127.0.0.1:{core_port}", *arguments_for("frontend", settings, sources)]
        frontend_child = await group.launch("frontend", frontend_arguments)
        worker = await group.wait_ready(worker_child, timeout_s)
        core_arguments = [f"--port={core_port}", f"--worker={worker.address}"]
        core_child = await group.launch("core", [*core_arguments, *arguments_for("core", settings, sources)])
        core = await group.wait_ready(core_child, timeout_s)
    frontend = await group.wait_ready(frontend_child, timeout_s)
    return [frontend, core, worker]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback interface that the system gives to nobody else meanwhile.

    The socket that holds it does not listen, so that a server of ours, which sets SO_REUSEADDR too, can take it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _reachable(ready: Ready) -> str:
    """An address that a client on this machine can use."""
    return ready.address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


async def show_answer(target: str, prompt: str, tls: TlsConfig | None) -> None:
    """Streams one answer to the terminal."""
    api_key = os.environ.get("PAGEWIRE_API_KEY", "")
    async with AsyncClient(target, timeout_s=120, tls=tls, api_key=api_key) as client:
        model = await client.get_model()
        print(f"\n> {prompt}\n", flush=True)
        started, num_tokens = time.monotonic(), 0
        ask = client.chat if model.has_chat_template else client.generate
        async for part in ask(prompt, temperature=0.0, max_tokens=48):
            print(part.text, end="", flush=True)
            num_tokens = part.usage.completion_tokens if part.usage else num_tokens
        print(f"\n\n({num_tokens} tokens in {time.monotonic() - started:.1f} s)\n", flush=True)


def _command(name: str) -> str:
    """How a user types a command of this virtual environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        return name
    shown = os.path.relpath(path)
    return shlex.quote(str(path) if shown.startswith("..") else shown)


def print_addresses(model: str, addresses: Sequence[Ready], target: str) -> None:
    """Where everything is, and one call to copy."""
    print(f"{model} is served:")
    for ready in addresses:
        print(f"  {ready.service:<9} {ready.address}")
    print("\nTry it from another terminal:")
    print(f'  {_command("pagewire")} generate --server {target} --temperature 0 "Why is the sky blue?"')
    grpcurl = Path(sys.executable).parent / "grpcurl"
    if grpcurl.exists() or shutil.which("grpcurl"):
        body = '{"text": "The capital of France is", "sampling_params": {"max_tokens": 8, "temperature": 0}}'
        print(f"  {_command('grpcurl')} -plaintext -d '{body}' {target} pagewire.v1.FrontendService/Generate")
    print(f"\nWatch it:\n  {_command('pagewire')} top --frontend {target}")
    print("\nCtrl-C ends it.", flush=True)


async def supervise(settings: ServeSettings, sources: Mapping[str, str]) -> int:
    """Runs the group until a signal (status 0 after a clean drain) or a death or failed start (1)."""
    group = Group()
    signalled = asyncio.ensure_future(wait_for_signal())
    running = asyncio.ensure_future(_run(group, settings, sources))
    await asyncio.wait((signalled, running), return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        print(f"\n{signalled.result().name}: draining (again to stop at once)", file=sys.stderr, flush=True)
        is_clean = await group.drain(settings.drain_s + 10)
        print("all processes have ended", file=sys.stderr, flush=True)
        return 0 if is_clean else 1
    signalled.cancel()
    error = running.exception()
    if not isinstance(error, PagewireError) and error is not None:
        await group.kill()
        raise error
    message = error.message if isinstance(error, PagewireError) else running.result()
    print(f"pagewire serve: {message}; stopping the others", file=sys.stderr, flush=True)
    await group.kill()
    return 1


def _report(demo: asyncio.Future[None]) -> None:
    """Raises what the demo failed of; but a prompt that this model does not take is no reason not to serve it."""
    error = demo.exception()
    if isinstance(error, InvalidArgumentError):
        print(f"The model does not take this prompt ({error.message}).\n", file=sys.stderr, flush=True)
    elif isinstance(error, UnauthenticatedError):
        print("No answer is shown: PAGEWIRE_API_KEY has none of the API keys.\n", file=sys.stderr, flush=True)
    elif error is not None:
        raise error


async def _run(group: Group, settings: ServeSettings, sources: Mapping[str, str]) -> str:
    """Starts everything and returns how the first process that ended did so."""
    addresses = await start_all(group, settings, sources)
    target = _reachable(addresses[0])
    death = asyncio.ensure_future(group.wait_for_death())
    if settings.demo:
        demo = asyncio.ensure_future(show_answer(target, settings.demo_prompt, settings.tls))
        await asyncio.wait((death, demo), return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            _report(demo)
        else:
            demo.cancel()
            await asyncio.gather(demo, return_exceptions=True)
    if not death.done():
        print_addresses(settings.model, addresses, target)
    return (await death).how_it_ended


def main(argv: Sequence[str]) -> int:
    """Runs `pagewire serve`; returns the exit status."""
    sources: dict[str, str] = {}
    settings = parse_settings(ServeSettings, "serve", argv, description=DESCRIPTION, sources=sources)
    setup_logging("serve", settings.log_level, settings.log_format)
    try:
        check_address(settings.host.strip("[]"), settings.port)
        fetch(settings.model)
        return asyncio.run(supervise(settings, sources))
    except PagewireError as error:
        print(f"pagewire serve: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
