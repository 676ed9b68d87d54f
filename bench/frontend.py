"""Frontend CPU time per token: on real processes with the gRPC write, and of the text work alone.

    python bench/frontend.py [--json] [--model smollm2] [--streams 64] [--tokens 256] [--runs 7] [--metrics]

Real processes (frontend_load.py), and a gRPC server that does nothing but send (bare_server.py), in turn: a core that
says a fixed text at a fixed pace without a model, the frontend, and one client with 64 or 16 streams, of `--tokens`
tokens each; the CPU time is all of the frontend's, with the reading from the core and the start of the requests. Text
work alone: step outputs made beforehand are fed to the output processor as a core would send them, one message per
step with one token for every stream: detokenize, look for stop strings, assemble and take deltas. Prints microseconds
per token: median and range over the runs. With --metrics only the real processes run, without and with the frontend's
metrics on, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from frontend_load import TEXT, load_tokenizer_files, measure_bare, measure_processes, measure_variants

from frontend_svc.output_processor import OutputProcessor
from frontend_svc.outputs import OutputKind
from frontend_svc.parallel_sampling import ParentRequest
from frontend_svc.request_state import RequestState
from frontend_svc.tokenizer import Tokenizer
from frontend_svc.wire import fill_response
from pagewire.engine import Finished, FinishReason, StepOutputs
from pagewire.sampling import SamplingParams
from pagewire.v1 import frontend_pb2

PACES = {64: 0.04, 16: 0.02}
"""Streams and seconds per step: about what two cores do with the default model."""
CASES = {
    "no stop strings": SamplingParams(),
    "two stop strings": SamplingParams(stop=("\n\nUser:", "</answer>")),
    "eight stop strings": SamplingParams(stop=tuple(f"### Section {i}" for i in range(8))),
}


def make_steps(tokenizer: Tokenizer, num_streams: int, num_tokens: int) -> list[StepOutputs]:
    """One message per step; each stream reads the text from another place."""
    text = tokenizer.encode(TEXT)
    request_ids = np.arange(1, num_streams + 1, dtype=np.uint64)
    ones = np.ones(num_streams, np.int32)
    steps = []
    for place in range(num_tokens):
        tokens = np.array([text[(place + stream) % len(text)] for stream in range(num_streams)], np.int32)
        steps.append(StepOutputs(place + 1, request_ids, ones * place, ones, tokens))
    steps[-1].finished = [Finished(row, FinishReason.LENGTH) for row in range(num_streams)]
    return steps


def measure(tokenizer: Tokenizer, steps: list[StepOutputs], params: SamplingParams, with_message: bool) -> float:
    """Microseconds per token of one run over all steps."""
    processor = OutputProcessor()
    num_streams = len(steps[0].request_ids)
    parents = []
    for stream in range(num_streams):
        parent = ParentRequest(str(stream), [1, 2, 3], OutputKind.DELTA)
        parent.add_child(RequestState(stream + 1, 0, params, [1, 2, 3], tokenizer, is_delta=True))
        processor.add(parent)
        parents.append(parent)
    message = frontend_pb2.GenerateResponse()
    started = time.thread_time()
    for outputs in steps:
        processor.process_outputs(outputs)
        for parent in parents:
            output = parent.take()
            if with_message:
                fill_response(message, output).SerializeToString()
    elapsed = time.thread_time() - started
    assert len(processor) == 0
    return elapsed / (num_streams * len(steps)) * 1e6


def compare_metrics(model: str, num_tokens: int, runs: int) -> None:
    """Prints CPU time per token of two frontends at one core, without and with metrics, in turns."""
    flags = ((), ("--metrics-port=0", "--metrics-host=127.0.0.1"))
    for num_streams, step_s in PACES.items():
        found = measure_variants(model, num_streams, num_tokens, step_s, runs, flags)
        for name, loads in zip(("without", "with"), found, strict=True):
            values = [load.frontend_us for load in loads]
            spread = f"({min(values):.2f} to {max(values):.2f})"
            print(f"  {num_streams} streams, {name} metrics: {statistics.median(values):.2f} us {spread}", flush=True)


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON line per figure: name, unit, values")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per stream")
    parser.add_argument("--runs", type=int, default=7, help="measured runs per case, after one to warm up")
    parser.add_argument("--metrics", action="store_true", help="real processes without and with metrics, in turns")
    args = parser.parse_args()
    if args.metrics:
        compare_metrics(args.model, args.tokens, args.runs)
        return
    tokenizer = Tokenizer(load_tokenizer_files(args.model))
    steps = make_steps(tokenizer, args.streams, args.tokens)

    def report(name: str, values: list[float]) -> None:
        if args.json:
            print(json.dumps({"name": f"frontend, CPU per token, {name}", "unit": "us", "values": values}), flush=True)
        else:
            median, spread = statistics.median(values), f"({min(values):.2f} to {max(values):.2f})"
            print(f"  {name:62} {median:6.2f} us  {spread}", flush=True)

    if not args.json:
        print(f"frontend CPU time per token, {args.tokens} tokens per stream, {args.runs} runs")
    for num_streams, step_s in PACES.items():
        loads = measure_processes(args.model, num_streams, args.tokens, step_s, args.runs)
        name = f"with the gRPC write, {num_streams} streams, steps of {1000 * step_s:g} ms"
        report(name, [load.frontend_us for load in loads])
        bare = measure_bare(num_streams, args.tokens, step_s, args.runs)
        report(f"a bare grpc.aio server, {num_streams} streams, steps of {1000 * step_s:g} ms", bare)
    for name, params in CASES.items():
        for with_message in (False, True):
            times = [measure(tokenizer, steps, params, with_message) for _ in range(args.runs + 1)][1:]
            report(f"text alone, {name}" + (", with message" if with_message else ""), times)


if __name__ == "__main__":
    main()
