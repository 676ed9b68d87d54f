"""`pagewire top`: what a running deployment does, live on a terminal, once as plain text, or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagewire.connection_flags import add_connection_flags, connection
from pagewire.generate import address, seconds
from pagewire.top.client import DEFAULT_TARGETS, Deployment
from pagewire.top.data import Sample, rates_between, to_json
from pagewire.top.format import ASCII, UNICODE, Glyphs
from pagewire.top.screen import screen

DESCRIPTION = """Show what a running deployment does: its services, rates, KV cache, last steps, and live requests with
their debt, which is what the next steps have to compute: prompt + output + drafts + placeholders - computed. Core and
worker are found through the frontend where no flag names them. Where standard output is no terminal it prints one look.
Shows names of requests and numbers, never a text."""
MIN_WIDTH = 80


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagewire top", description=DESCRIPTION)
    for service, target in DEFAULT_TARGETS.items():
        variable = "PAGEWIRE_SERVER" if service == "frontend" else f"PAGEWIRE_TOP_{service.upper()}"
        found = "" if service == "frontend" else "what the service in front of it says, else "
        parser.add_argument(
            f"--{service}",
            metavar="HOST:PORT",
            type=address,
            default=os.environ.get(variable) or None,
            help=f"address of the {service} (default: {found}{target}; env {variable})",
        )
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between two looks (default 1)"
    )
    parser.add_argument(
        "--once", action="store_true", help="look twice, an interval apart for the rates, print, and end"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per look instead of a screen")
    add_connection_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; status 1 where no service answered."""
    arguments = _parser().parse_args(argv)
    try:
        return asyncio.run(_main(arguments))
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        # TLS files that can't be read; a reader that has gone, as in `| head`.
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"pagewire top: {error}", file=sys.stderr)
        return 1


async def _main(arguments: argparse.Namespace) -> int:
    targets = {service: getattr(arguments, service) for service in DEFAULT_TARGETS}
    deployment = Deployment(targets, **connection(arguments))
    try:
        console = Console(highlight=False)
        if arguments.json:
            return await _print_json(deployment, arguments.interval, arguments.once)
        if arguments.once or not console.is_terminal or console.is_dumb_terminal:
            return await _print_once(deployment, console, arguments.interval)
        return await _live(deployment, console, arguments.interval)
    finally:
        await deployment.close()


async def _print_once(deployment: Deployment, console: Console, interval_s: float) -> int:
    before, now = await _look_twice(deployment, interval_s)
    width = console.width if console.is_terminal else max(console.width, MIN_WIDTH)
    lines = screen(
        before,
        now,
        width=width,
        height=None,
        glyphs=_glyphs(console),
        note=time.strftime("%Y-%m-%d", time.localtime(now.wall_s)),
    )
    console.print(_joined(lines), overflow="ignore", crop=False)
    return _status(now)


async def _print_json(deployment: Deployment, interval_s: float, is_once: bool) -> int:
    before, now = await _look_twice(deployment, interval_s)
    while True:
        print(json.dumps(to_json(now, rates_between(before, now))), flush=True)
        if is_once:
            return _status(now)
        before, now = now, await _next_look(deployment, now, interval_s)


async def _live(deployment: Deployment, console: Console, interval_s: float) -> int:
    """Until Ctrl-C. On the terminal's other screen, which leaves it as it was."""
    before, now = None, await deployment.look()
    note = f"every {interval_s:g} s, Ctrl-C ends it"
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            lines = screen(
                before,
                now,
                width=width,
                height=height,
                glyphs=_glyphs(console),
                note=note,
            )
            live.update(_joined(lines), refresh=True)
            before, now = now, await _next_look(deployment, now, interval_s)


async def _look_twice(deployment: Deployment, interval_s: float) -> tuple[Sample, Sample]:
    before = await deployment.look()
    return before, await _next_look(deployment, before, interval_s)


async def _next_look(deployment: Deployment, last: Sample, interval_s: float) -> Sample:
    await asyncio.sleep(max(last.taken_s + interval_s - time.monotonic(), 0))
    return await deployment.look()


def _joined(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True).join(lines)


def _glyphs(console: Console) -> Glyphs:
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def _status(now: Sample) -> int:
    return 0 if any(answer.stats is not None for answer in (now.frontend, now.core, now.worker)) else 1
