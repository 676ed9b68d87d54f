"""Chat templates render as transformers' apply_chat_template does; a template's refusal names the messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_tokenizers import make_tokenizer, sentencepiece_json

from frontend_svc.chat_template import ChatTemplate
from frontend_svc.tokenizer import Tokenizer
from pagewire.errors import FailedPreconditionError, InvalidArgumentError

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本 👋 <b>&amp;</b> 'q' \"d\""}],
    [
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "yes\n"},
        {"role": "user", "content": "and?"},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wëather", "parameters": {"type": "object", "properties": {"x": {"a": "<é>"}}}},
    }
]
TEMPLATES = {
    "llama": """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'system' %}
<<SYS>>{{ m['content'] | trim }}<</SYS>>
    {% elif m.role == 'user' %}
[INST] {{ m['content'] }} [/INST]
    {%- else %}
 {{ m.content }}{{ eos_token }}
    {% endif %}
{% endfor %}{% if add_generation_prompt %}>{% endif %}""",
    "tools": """{% if tools %}Tools: {{ tools | tojson }}
{{ tools | tojson(indent=2) }}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{{ 'go' if add_generation_prompt }}""",
    "loops": """{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m.content }}{% endfor %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{{ m.content }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "macros": """{% macro show(m) -%}[{{ m.role | upper }}]{{ m.content | default('none') }}{%- endmacro %}
{%- for m in messages -%}{{ show(m) }}{{ '\\n' if not loop.last }}{%- endfor -%}
{{ strftime_now('%Y') | length }}{{ pad_token is defined }}{{ extra | default('no extra') }}""",
}


@pytest.mark.parametrize(
    ("adds_prompt", "continues"), [(False, False), (True, False), (False, True)], ids=["plain", "prompt", "continue"]
)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["own", *TEMPLATES])
def test_renders_as_transformers_does(
    name: str,
    conversation: list[dict[str, Any]],
    adds_prompt: bool,
    continues: bool,
    smollm2: Tokenizer,
    smollm2_files: dict[str, bytes],
    smollm2_reference: Any,
) -> None:
    """The model's real template and hand-written ones with every helper that templates expect."""
    source = None if name == "own" else TEMPLATES[name]
    files = smollm2_files if source is None else {**smollm2_files, "chat_template.jinja": source.encode()}
    template = ChatTemplate(files, smollm2)
    tools = TOOLS if name == "tools" else None
    if continues and name == "loops" and len(conversation) > 2:
        # The last message is not in the text.
        with pytest.raises(InvalidArgumentError, match="messages"):
            template.render(conversation, continue_final_message=True)
        return
    expected = smollm2_reference.apply_chat_template(
        conversation,
        tools=tools,
        chat_template=source,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        tokenize=False,
        extra="given",
    )
    found = template.render(
        conversation,
        tools=tools,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        template_kwargs={"extra": "given"},
    )
    assert found == expected
    ids = smollm2_reference(expected, add_special_tokens=False)["input_ids"]
    assert smollm2.encode(found, add_special_tokens=False) == ids


def chat_template(source: object, **config: object) -> ChatTemplate:
    tokenizer = make_tokenizer(sentencepiece_json(), {"chat_template": source, **config})
    return ChatTemplate({"tokenizer_config.json": json.dumps({"chat_template": source}).encode()}, tokenizer)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages | map('nonsense') | list }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined_function() }}",
        "{{ (1).bit_length('x') }}",
    ],
)
def test_a_template_that_refuses_names_the_messages(source: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        chat_template(source).render([{"role": "user", "content": "x"}])
    assert caught.value.violations[0].field == "messages"


def test_the_refusals_own_words_are_shown() -> None:
    with pytest.raises(InvalidArgumentError, match="roles must alternate"):
        chat_template("{{ raise_exception('roles must alternate') }}").render([{"role": "user", "content": "x"}])


def test_template_from_the_configuration() -> None:
    """A string, or a list of named ones of which tools take their own; special tokens written as objects."""
    user = [{"role": "user", "content": "x"}]
    assert chat_template("{{ bos_token }}!", bos_token={"content": "<s>"}).render(user) == "<s>!"
    named = chat_template(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    )
    assert named.render(user) == "plain"
    assert named.render(user, tools=TOOLS) == "with 1"


def test_no_template_and_broken_template(sentencepiece: Tokenizer) -> None:
    absent = ChatTemplate({}, sentencepiece)
    assert not absent.is_present
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        absent.render([{"role": "user", "content": "x"}])
    broken = chat_template("{% if %}")  # the model still completes prompts
    assert not broken.is_present
    with pytest.raises(FailedPreconditionError, match="cannot be compiled"):
        broken.render([{"role": "user", "content": "x"}])


def test_callers_variables_do_not_shadow_the_conversation() -> None:
    template = chat_template("{{ messages | length }}{{ add_generation_prompt }}{{ other }}")
    kwargs = {"messages": [], "add_generation_prompt": "no", "other": 5}
    assert template.render([{"role": "user", "content": "x"}], template_kwargs=kwargs) == "1True5"
