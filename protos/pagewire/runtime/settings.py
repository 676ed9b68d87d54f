"""Settings of a process: a frozen dataclass, filled from flags, environment and defaults, in this order of precedence.

    @dataclass(frozen=True)
    class CoreSettings(CommonSettings):
        worker: str = setting("127.0.0.1:50053", help="address of the worker", metavar="HOST:PORT")

    settings = parse_settings(CoreSettings, "core", sys.argv[1:])

Field `max_num_seqs` of service `core` is the flag `--max-num-seqs`, the variable PAGEWIRE_CORE_MAX_NUM_SEQS or, for all
services at once, PAGEWIRE_MAX_NUM_SEQS. Empty variables count as unset. A bad value ends the process with exit status 2
and a message that names the flag or variable, the value, and what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagewire.runtime.log_levels import SYNTAX, checked_levels
from pagewire.runtime.logs import FORMATS
from pagewire.runtime.transport import MAX_MESSAGE_BYTES, TlsConfig

T = TypeVar("T")

PRECEDENCE = (
    "Precedence: a flag, then PAGEWIRE_<SERVICE>_<NAME>, then PAGEWIRE_<NAME>, then the default. "
    "An empty variable counts as unset."
)
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    choices: Sequence[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field with what its flag needs. Without a default it must be given.

    `low` and `high` are inclusive bounds; `parse` reads the text where the field's type does not say how, and raises
    ValueError with what is allowed.
    """
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "metavar": metavar, "parse": parse}
    return dataclasses.field(default=default, metadata=metadata)


def parse_bytes(text: str) -> int:
    """A number of bytes such as 1073741824, 512MiB or 4G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("must be a number of bytes such as 1073741824, 512MiB or 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class CommonSettings:
    """What every service has. A service overrides `port` with its own default."""

    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    port: int = setting(0, help="port to listen on; 0 takes a free one", low=0, high=65535)
    metrics_port: int | None = setting(
        None, help="port for metrics at http://.../metrics; 0 takes a free one", low=0, high=65535
    )
    metrics_host: str = setting("0.0.0.0", help="address that --metrics-port listens on")
    log_level: str = setting(
        "info",
        help="how much to log, and how much of single loggers, such as info,core_svc.steps=debug",
        metavar=SYNTAX,
        parse=checked_levels,
    )
    log_format: str = setting(
        "auto", help="form of log lines; auto: json in a container whose log is no terminal", choices=FORMATS
    )
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        help="largest message sent or received; the same for every process",
        low=1024,
        high=2**31 - 1,
        metavar="BYTES",
        parse=parse_bytes,
    )
    health_port: int | None = setting(
        None, help="port for plaintext grpc.health.v1 beside --port, for probes; 0 takes a free one", low=0, high=65535
    )
    health_host: str = setting("0.0.0.0", help="address that --health-port listens on")
    lame_duck_s: float = setting(
        0.0, help="seconds after SIGTERM with new calls still taken, not ready already", low=0, metavar="SECONDS"
    )
    drain_s: float = setting(
        30.0, help="seconds that running calls get to end at a shutdown, after --lame-duck-s", low=0, metavar="SECONDS"
    )
    tls_ca_file: str = setting("", help="PEM file to check the other side against", metavar="FILE")
    tls_cert_file: str = setting("", help="PEM file with this process's certificate", metavar="FILE")
    tls_key_file: str = setting("", help="PEM file with this process's key", metavar="FILE")

    tls_client_auth: bool = setting(
        True, help="let only those in that show a certificate of --tls-ca-file, where that is set"
    )

    @property
    def tls(self) -> TlsConfig | None:
        """TLS for this process's server and its connections; None where no file is named."""
        if not (self.tls_ca_file or self.tls_cert_file or self.tls_key_file):
            return None
        return TlsConfig(self.tls_ca_file, self.tls_cert_file, self.tls_key_file, self.tls_client_auth)


def parse_settings(
    cls: type[T],
    service: str,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
    description: str | None = None,
    prog: str | None = None,
    sources: dict[str, str] | None = None,
) -> T:
    """An instance of the dataclass `cls` from `argv` (without the program's name), the environment and defaults.

    `sources`, where given, is filled with the flag or variable behind every field that is no default.
    """
    parser = argparse.ArgumentParser(
        prog=prog or f"pagewire {service}",
        description=description if description is not None else (cls.__doc__ or "").strip(),
        epilog=PRECEDENCE,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(typing.cast(Any, cls))
    for field in fields:
        _add_flag(parser, field, hints[field.name], service)
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for field in fields:
        source, raw = _find(field.name, service, given, environ)
        if raw is None:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                parser.error(f"{_flag(field.name)} or {_variables(field.name, service)[0]} must be given")
            continue
        if sources is not None:
            sources[field.name] = source
        try:
            values[field.name] = raw if isinstance(raw, bool) else _parse(raw, hints[field.name], field)
        except ValueError as error:
            parser.error(f"{source} is {raw!r}: {error}")
    try:
        return cls(**values)
    except ValueError as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variables(name: str, service: str) -> tuple[str, str]:
    return f"PAGEWIRE_{service.upper()}_{name.upper()}", f"PAGEWIRE_{name.upper()}"


def _find(name: str, service: str, given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, Any]:
    if name in given:
        return _flag(name), given[name]
    for variable in _variables(name, service):
        if environ.get(variable):
            return variable, environ[variable]
    return "", None


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any, service: str) -> None:
    default = field.default
    shown = "required" if default is dataclasses.MISSING else f"default: {_shown(default)}"
    help_text = f"{field.metadata.get('help', '')} ({shown}; env {_variables(field.name, service)[0]})".strip()
    help_text = help_text.replace("%", "%%")
    if hint is bool:
        parser.add_argument(
            _flag(field.name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
        )
        return
    choices = field.metadata.get("choices")
    metavar = field.metadata.get("metavar") or ("{" + ",".join(map(str, choices)) + "}" if choices else None)
    parser.add_argument(
        _flag(field.name), default=argparse.SUPPRESS, help=help_text, metavar=metavar or _metavar(_plain(hint))
    )


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "none" if default is None else "''" if default == "" else str(default)


def _metavar(hint: Any) -> str:
    return {int: "N", float: "X"}.get(hint, "TEXT")


def _plain(hint: Any) -> Any:
    """The type behind `X | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _parse(text: str, hint: Any, field: dataclasses.Field[Any]) -> Any:
    """The value of a flag or variable. Raises ValueError saying what is allowed."""
    hint = _plain(hint)
    parse = field.metadata.get("parse")
    if parse is not None:
        value = parse(text)
    elif hint is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError("must be true or false")
        return text.lower() in _TRUE
    elif hint in (int, float):
        try:
            value = hint(text)
        except ValueError:
            raise ValueError(f"must be {'an integer' if hint is int else 'a number'}") from None
    elif typing.get_origin(hint) is tuple:
        value = tuple(part.strip() for part in text.split(",") if part.strip())
    else:
        value = text
    _check(value, field)
    return value


def _check(value: Any, field: dataclasses.Field[Any]) -> None:
    choices, low, high = (field.metadata.get(key) for key in ("choices", "low", "high"))
    if choices is not None and value not in choices:
        raise ValueError(f"must be one of {', '.join(map(str, choices))}")
    is_low, is_high = low is not None and not value >= low, high is not None and not value <= high
    if is_low or is_high:
        if low is not None and high is not None:
            raise ValueError(f"must be in [{low}, {high}]")
        raise ValueError(f"must be at least {low}" if low is not None else f"must be at most {high}")
