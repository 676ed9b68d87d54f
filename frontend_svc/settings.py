"""Settings of a frontend process."""

from __future__ import annotations

from dataclasses import dataclass

from frontend_svc.core_targets import split
from frontend_svc.output_processor import DEFAULT_MAX_TOKENS_BEHIND
from pagewire.runtime.settings import CommonSettings, setting


@dataclass(frozen=True)
class FrontendSettings(CommonSettings):
    """Serves text in, text out: tokenizes, hands requests to a core, and streams the answers."""

    port: int = setting(50051, help="port to listen on; 0 takes a free one", low=0, high=65535)
    core: tuple[str, ...] = setting(
        ("127.0.0.1:50052",),
        help="address of the core, of several with commas; dns:///HOST:PORT: all that the name has, now and later",
        metavar="HOST:PORT",
    )
    api_keys_file: str = setting(
        "", help="file of the keys that callers need, lines name:key; read again when it changes", metavar="FILE"
    )
    max_tokens_behind: int = setting(
        DEFAULT_MAX_TOKENS_BEHIND,
        help="tokens that may pile up for a caller that does not read before it is cut off",
        low=1,
        metavar="TOKENS",
    )
    log_requests: bool = setting(False, help="log a line for each request that ended; never its text")

    def __post_init__(self) -> None:
        if not self.core:
            raise ValueError("--core is empty: must be HOST:PORT")
        for entry in self.core:
            split(entry)
