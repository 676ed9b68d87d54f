"""`pagewire generate`: one prompt to a running frontend, its answer streamed to the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pagewire.client import Client, Response
from pagewire.client_trace import call_span, client_tracing
from pagewire.client_types import RequestOptions
from pagewire.connection_flags import add_connection_flags, connection
from pagewire.errors import PagewireError
from pagewire.sampling_flags import add_sampling_flags, sampling_from_flags

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer

DEFAULT_SERVER = "127.0.0.1:50051"


def server_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --server and what it takes to be let in there."""
    default = os.environ.get("PAGEWIRE_SERVER") or DEFAULT_SERVER
    help_text = f"address of a frontend (default: {DEFAULT_SERVER}; env PAGEWIRE_SERVER)"
    parser.add_argument("--server", metavar="HOST:PORT", default=default, type=address, help=help_text)
    add_connection_flags(parser)


def address(text: str) -> str:
    """The value of a flag that takes an address."""
    # Without a port gRPC takes 443, and says so nowhere.
    if ":" not in text.strip(":"):
        raise argparse.ArgumentTypeError(f"must be an address such as {DEFAULT_SERVER}, and is {text!r}")
    return text


def seconds(text: str) -> float:
    """The value of a flag that takes a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, and is {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewire generate",
        description="Send one prompt to a running frontend and stream the answer. Text goes to standard output, "
        "the count of tokens to standard error.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; left out or - reads standard input")
    server_flag(parser)
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask through the model's chat template (default: where it has one); --no-chat continues the plain text",
    )
    parser.add_argument("--system", default="", help="system message of a chat")
    parser.add_argument("--timeout", type=seconds, default=None, metavar="SECONDS", help="give up after so long")
    parser.add_argument("--quiet", action="store_true", help="no line with the count of tokens")
    add_sampling_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    prompt = _read_prompt() if arguments.prompt in (None, "-") else arguments.prompt
    try:
        client = Client(arguments.server, timeout_s=arguments.timeout, **connection(arguments))
        with client_tracing() as tracer, client:
            _ask(client, prompt, arguments, tracer)
    except BrokenPipeError:
        # The reader of our output has gone, as in `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (PagewireError, OSError) as error:
        print(f"pagewire generate: {error.message if isinstance(error, PagewireError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D on an empty line ends it.", file=sys.stderr)
    return sys.stdin.read()


def _ask(client: Client, prompt: str, arguments: argparse.Namespace, tracer: Tracer | None) -> None:
    sampling = sampling_from_flags(arguments)
    is_chat = arguments.chat if arguments.chat is not None else client.get_model().has_chat_template
    with call_span(tracer, client.target, "Chat" if is_chat else "Generate") as trace_context:
        options = RequestOptions(trace_context=trace_context)
        if is_chat:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            parts = client.chat([*system, {"role": "user", "content": prompt}], options=options, **sampling)
        else:
            parts = client.generate(prompt, options=options, **sampling)
        _print(parts, sampling.get("n", 1), arguments.quiet)


def _print(parts: Iterator[Response], n: int, is_quiet: bool) -> None:
    """Prints what comes, as it comes if there is one completion."""
    started = time.monotonic()
    if n > 1:
        collected = list(parts)
        _print_all(collected)
        last = collected[-1] if collected else None
    else:
        last = None
        for last in parts:
            print(last.text, end="", flush=True)
        print(flush=True)
    if last is not None and last.usage is not None and not is_quiet:
        usage, reason = last.usage, next((o.finish_reason for o in last.outputs if o.finish_reason), None)
        print(
            f"[{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated "
            f"in {time.monotonic() - started:.2f} s, ended by {reason.name.lower() if reason else 'the server'}]",
            file=sys.stderr,
        )


def _print_all(parts: list[Response]) -> None:
    """Several completions come interleaved: each is printed as a whole."""
    texts: dict[int, str] = {}
    for part in parts:
        for output in part.outputs:
            texts[output.index] = texts.get(output.index, "") + output.text
    for index, text in sorted(texts.items()):
        print(f"--- {index}\n{text}")
