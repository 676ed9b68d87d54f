"""TLS as command line flags: the same files, flags and variables as the services have."""

from __future__ import annotations

import argparse
import os

from pagewire.runtime.transport import TlsConfig

_FLAGS = {
    "tls_ca_file": "PEM file to check servers against",
    "tls_cert_file": "PEM file with this client's certificate",
    "tls_key_file": "PEM file with this client's key",
}


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --tls-ca-file, --tls-cert-file and --tls-key-file."""
    for name, what in _FLAGS.items():
        variable = f"PAGEWIRE_{name.upper()}"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            metavar="FILE",
            default=os.environ.get(variable, ""),
            help=f"{what} (env {variable})",
        )


def tls_from_flags(arguments: argparse.Namespace) -> TlsConfig | None:
    """What the flags say; None where no file is named."""
    files = [getattr(arguments, name) for name in _FLAGS]
    return TlsConfig(*files) if any(files) else None
