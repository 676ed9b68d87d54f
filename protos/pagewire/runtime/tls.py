"""TLS of a process from PEM files, for its server and for its connections; renewed files count without a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files. A server needs certificate and key, and asks clients for certificates where `ca_file` is set.

    A client checks the server against `ca_file` (the system's roots where empty) and shows its own certificate, if any.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    asks_clients: bool = True
    """Whether a server with a `ca_file` lets only clients in that show a certificate of it."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server, which look for changed files at every new connection.

        Raises OSError where a file can't be read.
        """
        if not (self.cert_file and self.key_file):
            raise OSError("a server with TLS needs a certificate and its key: --tls-cert-file and --tls-key-file")
        files = _Files([path for path in (self.cert_file, self.key_file, self._client_ca) if path])
        first = self._certificates()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # On a thread of gRPC's own; what this raises would end the connection that waits.
            try:
                if not files.have_changed():
                    return None
                found = self._certificates()
            except OSError as error:
                log.error("changed TLS files can't be read, the old ones stay in use: %s", error)
                return None
            log.info("TLS files read again: %s", self.cert_file)
            return found

        return grpc.dynamic_ssl_server_credentials(
            first,
            fetch,  # type: ignore[arg-type]  # None says that nothing has changed
            require_client_authentication=bool(self._client_ca),
        )

    @property
    def _client_ca(self) -> str:
        return self.ca_file if self.asks_clients else ""

    def _certificates(self) -> grpc.ServerCertificateConfiguration:
        pair = (Path(self.key_file).read_bytes(), Path(self.cert_file).read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=_read(self._client_ca))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client, of the files as they are now. Raises OSError where one can't be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )


class _Files:
    """Tells whether files have changed since they were last looked at."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._stamps = self._look()

    def have_changed(self) -> bool:
        """Raises OSError where one is gone."""
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        return True

    def _look(self) -> list[tuple[int, int, int]]:
        return [(status.st_mtime_ns, status.st_ino, status.st_size) for status in map(os.stat, self._paths)]


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
