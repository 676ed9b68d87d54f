"""Settings of a frontend process."""

from __future__ import annotations

from dataclasses import dataclass

from frontend_svc.output_processor import DEFAULT_MAX_TOKENS_BEHIND
from pagewire.runtime.settings import CommonSettings, setting


@dataclass(frozen=True)
class FrontendSettings(CommonSettings):
    """Serves text in, text out: tokenizes, hands requests to a core, and streams the answers."""

    port: int = setting(50051, help="port to listen on; 0 takes a free one", low=0, high=65535)
    core: str = setting("127.0.0.1:50052", help="address of the core", metavar="HOST:PORT")
    max_tokens_behind: int = setting(
        DEFAULT_MAX_TOKENS_BEHIND,
        help="tokens that may pile up for a caller that does not read before it is cut off",
        low=1,
        metavar="TOKENS",
    )
    log_requests: bool = setting(False, help="log a line for each request that ended; never its text")
