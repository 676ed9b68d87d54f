"""Settings: precedence, parsing, bounds, and messages that name what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagewire.runtime.settings import CommonSettings, parse_bytes, parse_settings, setting


@dataclass(frozen=True)
class Example(CommonSettings):
    """An example service."""

    worker: str = setting("127.0.0.1:50053", help="address of the worker", metavar="HOST:PORT")
    policy: str = setting("fcfs", help="100% of what there is", choices=["fcfs", "priority"])
    max_num_seqs: int = setting(128, help="most requests at once", low=1, high=4096)
    memory: int = setting(0, help="memory", parse=parse_bytes)
    share: float | None = setting(None, help="a share", low=0, high=1)
    enable_prefix_caching: bool = setting(True, help="reuse KV")
    names: tuple[str, ...] = setting((), help="names")
    block_size: int = 16


@dataclass(frozen=True)
class Required:
    """A required setting."""

    core: str = setting(help="address of the core")


def parse(*argv, cls=Example, **environ):
    return parse_settings(cls, "core", argv, environ=environ)


def test_defaults():
    assert parse() == Example()


def test_precedence():
    """Flag, then the service's variable, then the variable of all, then the default."""
    every = {"PAGEWIRE_CORE_MAX_NUM_SEQS": "3", "PAGEWIRE_MAX_NUM_SEQS": "4"}
    assert parse("--max-num-seqs", "2", **every).max_num_seqs == 2
    assert parse(**every).max_num_seqs == 3
    assert parse(PAGEWIRE_MAX_NUM_SEQS="4").max_num_seqs == 4
    assert parse(PAGEWIRE_CORE_MAX_NUM_SEQS="", PAGEWIRE_MAX_NUM_SEQS="").max_num_seqs == 128
    assert parse(PAGEWIRE_WORKER_MAX_NUM_SEQS="5").max_num_seqs == 128


def test_types():
    found = parse("--memory", "1.5GiB", "--share=0.25", "--no-enable-prefix-caching", "--names", "a, b,", "--port=0")
    assert found.memory == 3 * 2**29
    assert found.share == 0.25
    assert found.enable_prefix_caching is False
    assert found.names == ("a", "b")
    assert parse(PAGEWIRE_ENABLE_PREFIX_CACHING="off").enable_prefix_caching is False
    assert parse("--enable-prefix-caching", PAGEWIRE_ENABLE_PREFIX_CACHING="0").enable_prefix_caching is True
    assert parse("--block-size", "32").block_size == 32


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--port", "70000"], {}, ["--port", "70000", "[0, 65535]"]),
        (["--max-num-seqs", "many"], {}, ["--max-num-seqs", "many", "an integer"]),
        (["--share", "nan"], {}, ["--share", "nan", "[0, 1]"]),
        (["--policy", "lifo"], {}, ["--policy", "lifo", "fcfs, priority"]),
        (["--memory", "lots"], {}, ["--memory", "lots", "512MiB"]),
        (["--max-num", "1"], {}, ["--max-num"]),
        ([], {"PAGEWIRE_CORE_PORT": "-1"}, ["PAGEWIRE_CORE_PORT", "-1", "[0, 65535]"]),
        ([], {"PAGEWIRE_ENABLE_PREFIX_CACHING": "maybe"}, ["PAGEWIRE_ENABLE_PREFIX_CACHING", "maybe", "true or false"]),
    ],
)
def test_bad_values_exit_2_and_say_why(argv, environ, words, capsys):
    """Exit status 2; the message has the flag or variable, the value and what is allowed."""
    with pytest.raises(SystemExit) as caught:
        parse(*argv, **environ)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_required(capsys):
    assert parse(cls=Required, PAGEWIRE_CORE="host:1").core == "host:1"
    with pytest.raises(SystemExit) as caught:
        parse(cls=Required)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "--core" in message
    assert "PAGEWIRE_CORE_CORE" in message


def test_help_tells_defaults_variables_and_precedence(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("An example service", "default: 128", "PAGEWIRE_CORE_MAX_NUM_SEQS", "100% of", "Precedence: a flag"):
        assert words in text


def test_tls_is_off_unless_a_file_is_named():
    assert Example().tls is None
    tls = parse("--tls-ca-file", "ca.pem").tls
    assert tls is not None
    assert tls.ca_file == "ca.pem"


@pytest.mark.parametrize(
    ("text", "value"), [("17", 17), ("2k", 2000), ("2KiB", 2048), ("4GB", 4 * 10**9), ("1ti", 2**40)]
)
def test_parse_bytes(text, value):
    assert parse_bytes(text) == value
