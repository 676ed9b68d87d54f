"""Renders a conversation with the model's own Jinja template, in a sandbox.

Templates are written against transformers' `apply_chat_template`; the environment here offers the same helpers, so
that the same template gives the same text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend_svc.tokenizer import Tokenizer
from pagewire.errors import FailedPreconditionError, InvalidArgumentError, violation

log = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
MAX_RENDERED_CHARACTERS = 64 * 2**20
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_OPEN_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning under different names; all see the same."""
    found = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


class ChatTemplate:
    """A model's chat templates, compiled once.

    Args:
        files: the tokenizer's files; chat_template.jinja, or `chat_template` in tokenizer_config.json.
        tokenizer: gives the named special tokens.
    """

    def __init__(self, files: Mapping[str, bytes], tokenizer: Tokenizer) -> None:
        self._special_tokens = tokenizer.special_tokens_map
        self._sources = _sources(files, tokenizer.config)
        self._compiled: dict[str, jinja2.Template] = {}
        self._broken: dict[str, str] = {}
        """Why a template can't be used, by name: a model without a working one can still complete prompts."""
        environment = _environment()
        for name, source in self._sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                self._broken[name] = f"the model's chat template {name!r} cannot be compiled: {error}"
                log.warning("%s; only Generate is served", self._broken[name])

    @property
    def is_present(self) -> bool:
        return bool(self._compiled)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            InvalidArgumentError: there is no template, or it refuses these messages.
            FailedPreconditionError: the template is broken.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        if name in self._broken:
            raise FailedPreconditionError(self._broken[name], reason="BROKEN_CHAT_TEMPLATE")
        if name not in self._compiled:
            raise InvalidArgumentError(
                [violation("messages", f"{len(messages)} messages", "the model has no chat template; use Generate")]
            )
        if not messages:
            raise InvalidArgumentError([violation("messages", [], "must not be empty")])
        chat = [_with_reasoning_names({k: v for k, v in m.items() if v is not None}) for m in messages]
        final = _mark_final(chat) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": (template_kwargs or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._compiled[name].render(variables)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _refused(len(messages), str(error)) from error
        except (RecursionError, MemoryError) as error:
            raise _refused(len(messages), type(error).__name__) from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise _refused(len(messages), f"the text would have {len(text)} characters")
        return _cut_at_mark(text, final, len(messages)) if continue_final_message else text


def _refused(num_messages: int, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        [violation("messages", f"{num_messages} messages", f"refused by the model's chat template: {why}")]
    )


def _sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    if TEMPLATE_FILE in files:
        found = {"default": files[TEMPLATE_FILE].decode()}
        for name, data in files.items():
            if name.startswith("additional_chat_templates/") and name.endswith(".jinja"):
                found[name.split("/")[-1].removesuffix(".jinja")] = data.decode()
        return found
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        return {str(name): str(source) for name, source in template.items()}
    return {}


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Puts a mark after the last message's text, where the prompt will be cut; returns the text."""
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise InvalidArgumentError(
            [
                violation(
                    f"messages[{len(chat) - 1}].content", content, "must be text where continue_final_message is set"
                )
            ]
        )
    chat[-1]["content"] = content + _OPEN_MARK
    return content


def _cut_at_mark(text: str, final: str, num_messages: int) -> str:
    mark = _OPEN_MARK.strip()
    if final.strip() not in text or mark not in text:
        raise _refused(num_messages, "the last message does not appear in its text, so it cannot be continued")
    at = text.rindex(mark)
    # A template that trims messages takes the mark's trailing space too; then the text before it is trimmed as well.
    return text[:at] if text[at : at + len(_OPEN_MARK)] == _OPEN_MARK else text[:at].rstrip()
