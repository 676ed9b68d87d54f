"""`python trace_client.py TARGET WHAT`: a program that traces itself with opentelemetry and calls a frontend.

Prints one line of JSON: its pid, the trace and span of each call, and how the call ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from pagewire.client import AsyncClient
from pagewire.client_types import RequestOptions
from pagewire.errors import PagewireError

tracer = trace.get_tracer("somebody's program")


async def call(client: AsyncClient, name: str, messages: Any = None, **sampling: Any) -> dict[str, Any]:
    """One call under a span of its own; an abort after the first token where the name says so."""
    said: dict[str, Any] = {"ended": "ok", "reasons": [], "completion_tokens": 0}
    with tracer.start_as_current_span(name, kind=trace.SpanKind.CLIENT) as span:
        context = span.get_span_context()
        said |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        options = RequestOptions(request_id=name)
        timeout_s = sampling.pop("timeout_s", 60.0)
        prompt = sampling.pop("prompt", "hello world")
        if messages is not None:
            stream = client.chat(messages, options=options, timeout_s=timeout_s, **sampling)
        else:
            stream = client.generate(prompt, options=options, timeout_s=timeout_s, **sampling)
        try:
            async for part in stream:
                said["reasons"] += [o.finish_reason.name for o in part.outputs if o.finish_reason is not None]
                if part.usage is not None:
                    said["completion_tokens"] = part.usage.completion_tokens
                if name == "left":
                    break
                if name == "aborted" and not part.is_finished:
                    await client.abort(name)
        except PagewireError as error:
            said["ended"] = error.code
    return {name: said}


async def main(target: str, what: str) -> dict[str, Any]:
    long = {"max_tokens": 3000, "temperature": 0.0, "ignore_eos": True}
    short = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    async with AsyncClient(target) as client:
        if what == "one":
            return await call(client, "one", [{"role": "user", "content": "hello"}], **short)
        calls = {
            "pair a": {"prompt": "hello", **short, "max_tokens": 40},
            "pair b": {"prompt": "world", **short, "max_tokens": 40},
            "three": {**short, "n": 3, "temperature": 1.0},
            "aborted": long,
            "left": long,
            "late": {**long, "timeout_s": 0.8},
            "refused": {**short, "temperature": -1.0},
        }
        pair = await asyncio.gather(*(call(client, name, **calls.pop(name)) for name in ("pair a", "pair b")))
        found = pair[0] | pair[1]
        for name, sampling in calls.items():
            found |= await call(client, name, **sampling)
        return found


if __name__ == "__main__":
    provider = TracerProvider(resource=Resource.create({"service.name": "a client", "process.pid": os.getpid()}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    found = asyncio.run(main(*sys.argv[1:3]))
    provider.shutdown()
    print(json.dumps({"pid": os.getpid(), **found}))
