"""What a client needs to be let in, as command line flags: API key and TLS, named as the services name them."""

from __future__ import annotations

import argparse
import os
from typing import Any

from pagewire.runtime.transport import TlsConfig

_TLS_FILES = {
    "tls_ca_file": "speak TLS, and check servers against this PEM file",
    "tls_cert_file": "PEM file with the certificate to show to servers",
    "tls_key_file": "PEM file with that certificate's key",
}


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --api-key, --tls-ca-file, --tls-cert-file and --tls-key-file."""
    _add(parser, "api_key", "KEY", "API key of a frontend; better by its variable, for everybody here can see flags")
    for name, what in _TLS_FILES.items():
        _add(parser, name, "FILE", what)


def _add(parser: argparse.ArgumentParser, name: str, metavar: str, what: str) -> None:
    variable = f"PAGEWIRE_{name.upper()}"
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        metavar=metavar,
        default=os.environ.get(variable, ""),
        help=f"{what} (env {variable})",
    )


def connection(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as keyword arguments of a client: `api_key`, and `tls`, None where no file is named."""
    files = [getattr(arguments, name) for name in _TLS_FILES]
    return {"api_key": arguments.api_key, "tls": TlsConfig(*files) if any(files) else None}
