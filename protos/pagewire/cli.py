"""The command line: `pagewire <command>`. Each command is imported when it is run, so `--help` is quick."""

from __future__ import annotations

import importlib
import io
import runpy
import sys
from collections.abc import Sequence

USAGE = """\
usage: pagewire <command> [flags]        (pagewire <command> --help tells its flags)

Everything on this machine:
  serve      fetch a model, start frontend, core and worker, show one answer, serve until Ctrl-C

Talk to a running server:
  generate   send one prompt and stream the answer to the terminal
  bench      measure throughput, time to first token and inter-token latency
  top        watch a deployment: requests, steps, KV cache, rates, services

One process each, for several machines or a debugger:
  worker     the muscle: loads the model and computes           (listens on 50053)
  core       the brain: schedules requests onto a worker        (listens on 50052, needs --worker)
  frontend   text in, text out: the service that clients call   (listens on 50051, needs --core)

Models:
  fetch      fetch a model now and print where it is, such as `pagewire fetch smollm2`

Every flag of serve, worker, core and frontend can be a variable too. Precedence: the flag --max-num-seqs, then
PAGEWIRE_CORE_MAX_NUM_SEQS (of one service), then PAGEWIRE_MAX_NUM_SEQS (of all), then the default.

First try:  pagewire serve        and, in another terminal:  pagewire generate "Why is the sky blue?"
"""

_OWN = {
    "serve": "pagewire.serve",
    "generate": "pagewire.generate",
    "bench": "pagewire.bench",
    "top": "pagewire.top.command",
}
_SERVICES = {"frontend": "frontend_svc", "core": "core_svc", "worker": "worker_svc", "fetch": "worker_svc.fetch"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model says what a terminal may not be able to write.
        sys.stdout.reconfigure(errors="replace")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"pagewire {version('pagewire')}")
        return 0
    try:
        if command in _OWN:
            return int(importlib.import_module(_OWN[command]).main(rest))
        if command in _SERVICES:
            # By name and not by import: this package knows no service.
            sys.argv = [f"pagewire {command}", *rest]
            runpy.run_module(_SERVICES[command], run_name="__main__", alter_sys=False)
            return 0
    except ModuleNotFoundError as error:
        extra = _SERVICES.get(command, "client").partition("_")[0]
        print(
            f"pagewire {command}: the package {error.name!r} is not installed; "
            f"pip install 'pagewire[{extra}]' has what this command needs",
            file=sys.stderr,
        )
        return 1
    print(f"pagewire: there is no command {command!r}\n\n{USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
