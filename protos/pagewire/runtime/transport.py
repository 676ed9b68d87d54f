"""How every connection of Pagewire is set up: message limits, keepalive and reconnects, the same on both ends.

Message limit: `MAX_MESSAGE_BYTES` in both directions on both ends, changed by `--max-message-bytes` or
`PAGEWIRE_MAX_MESSAGE_BYTES` (set it for every process alike).

Keepalive: a client pings after `KEEPALIVE_TIME_MS` of silence and gives up `KEEPALIVE_TIMEOUT_MS` later; servers do the
same and allow pings twice as often as clients send them, streams or not, so nobody is sent away for too many pings.
`grpc.http2.ping_timeout_ms` has to be set beside the keepalive timeout: its default of 60 s hides a frozen peer.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from pagewire.runtime.tls import TlsConfig as TlsConfig

MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_LIMIT_SETTING = "--max-message-bytes (PAGEWIRE_MAX_MESSAGE_BYTES)"
"""How the message limit is named in errors and help texts."""

KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
MIN_PING_INTERVAL_MS = KEEPALIVE_TIME_MS // 2

_RECONNECT_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def _common_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC takes http_proxy for every target, this machine's too, and few HTTP proxies carry it.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Channel arguments of every server."""
    return [
        *_common_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # Two servers must not share a port in silence.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, service_config_json: str | None = None
) -> list[tuple[str, Any]]:
    """Channel arguments of every client. `service_config_json` may set balancing and health checking."""
    options: list[tuple[str, Any]] = [*_common_options(max_message_bytes), *_RECONNECT_OPTIONS]
    if service_config_json is not None:
        options.append(("grpc.service_config", service_config_json))
    return options


def secure_or_insecure_channel(
    target: str,
    tls: TlsConfig | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    service_config_json: str | None = None,
    server_name: str = "",
) -> grpc.aio.Channel:
    """An asyncio channel to `target` (host:port or any gRPC target).

    `server_name`: whom the server's certificate has to name, where that is not the target's host.
    """
    options = channel_options(max_message_bytes, service_config_json)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=options)


def sync_channel(
    target: str,
    tls: TlsConfig | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    service_config_json: str | None = None,
) -> grpc.Channel:
    """A blocking channel to `target`, set up like the asyncio one."""
    options = channel_options(max_message_bytes, service_config_json)
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, tls.channel_credentials(), options=options)


def format_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
