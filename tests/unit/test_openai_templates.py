"""Chat templates of today's constructs, with earlier calls of tools in every form that clients send
their arguments in.
"""

import json

import pytest

from backend.config import OpenaiConfig
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.routes import text_of
from backend.openai_frontend.template import ChatTemplate
from tests.fakes.chats import HEADERS

ROLES = (
    "{%- for m in messages if m.role not in ['user', 'assistant', 'tool', 'system'] %}"
    "{{- raise_exception('Unknown role ' ~ m.role) }}{% endfor %}"
)
TURNS = (
    "{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
)
"""A template's loops, around how it writes a call."""
TEMPLATES = {
    "items": "({{ call.function.name }}{% for name, value in call.function.arguments.items() %} "
    "{{ name }}={{ value }}{% endfor %})",
    "items filter": "({{ call['function']['name'] }}{% for name, value in "
    "call['function']['arguments'] | items %} {{ name }}={{ value | string }}{% endfor %})",
    "dictsort": "({{ call.function.name }}{% for name, value in call.function.arguments | dictsort "
    "%} {{ name }}={{ value }}{% endfor %})",
    "keys": "({{ call.function.name }}{% for name in call.function.arguments %} {{ name }}="
    "{{ call.function.arguments[name] }}{% endfor %})",
    "mapping or nothing": "{% if call.function.arguments is mapping %}{{ call.function.name }}"
    "{% else %}{{ raise_exception('arguments must be a mapping') }}{% endif %}",
    "tojson": '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}",
    "tojson of all": "{{ call.function | tojson }}",
    "string or tojson": "{% set args = call.function.arguments %}{% if args is string %}{{ args }}"
    "{% else %}{{ args | tojson(ensure_ascii=False) }}{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for name in call.function.arguments %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ call.function.name }}/{{ ns.n }}",
    "macro": "{% macro shown(args) %}{% for k, v in args.items() %}{{ k }}:{{ v }};{% endfor %}"
    "{% endmacro %}{{ call.function.name }}({{ shown(call.function.arguments) }})",
    "generation": "{% generation %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endgeneration %}",
    "first call": "{% set f = m.tool_calls[0].function %}{{ f.name }}{{ f.arguments | tojson }}",
    "continue": "{% if call.type != 'function' %}{% continue %}{% endif %}{{ call.function.name }}"
    "{% for k, v in call.function.arguments | items %}{{ k }}{{ v }}{% endfor %}",
    "date": "{{ strftime_now('%Y') | length }}{{ call.function.name }}{{ call.id }}"
    "{{ call.function.arguments | tojson(indent=2) }}",
}
PRINTS_TEXT = {"keys", "namespace", "tojson", "tojson of all", "string or tojson"} | {
    *("generation", "first call", "date")
}
"""Templates to which arguments may be any text."""
NO_ARGUMENTS = ["", " ", "\n", "null", " null ", "{}", "{ }", None, {}]
SOME = ['{"zone": "UTC"}', ' {"zone":\n"UTC"} ', {"zone": "UTC"}]
NO_OBJECTS = ["[]", "1", '"a"', "true", '[{"zone": 1}]', "[" * 100_000, 1, [], True]
CUT = ['{"zone": "U', "zone=UTC", "{'zone': 1}", '{"a": 1}{"b": 2}', "None"]
FIELD = "messages[1].tool_calls[0].function.arguments"


def conversation(**function):
    call = {"id": "c1", "type": "function", "function": {"name": "clock", **function}}
    return [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]


def rendered(source, messages, **settings):
    front_end = FrontEnd("", ("m",), ChatTemplate(source), **settings)
    text, _ = text_of(front_end, json.dumps({"messages": messages}).encode(), HEADERS)
    return text


def prompt(construct, messages, **settings):
    return rendered(ROLES + TURNS.replace("%s", TEMPLATES[construct]), messages, **settings)


@pytest.mark.parametrize("escapes", [False, True])
@pytest.mark.parametrize("construct", TEMPLATES)
def test_earlier_calls_are_shown_in_every_form_of_their_arguments(construct, escapes):
    options = OpenaiConfig(escape_special_tokens=escapes)
    settings = {"options": options, "special_tokens": {"<s>": 0}}
    absent = prompt(construct, conversation(), **settings)
    assert "clock" in absent or construct == "string or tojson"
    for arguments in NO_ARGUMENTS:
        assert prompt(construct, conversation(arguments=arguments), **settings) == absent
    some = {prompt(construct, conversation(arguments=form), **settings) for form in SOME}
    assert len(some) == 1
    assert some == {absent} or construct != "mapping or nothing"


@pytest.mark.parametrize("construct", TEMPLATES)
def test_what_cannot_be_arguments_is_refused_by_field_and_value(construct):
    refused = NO_OBJECTS + ([] if construct in PRINTS_TEXT else CUT)
    for arguments in refused:
        with pytest.raises(ApiError) as raised:
            prompt(construct, conversation(arguments=arguments))
        assert (raised.value.status, raised.value.param) == (400, FIELD)
        assert json.dumps(arguments)[:50] in str(raised.value)
    for arguments in CUT if construct in PRINTS_TEXT else []:
        assert prompt(construct, conversation(arguments=arguments))


@pytest.mark.parametrize("escapes", [False, True])
def test_arguments_may_be_nested_deeply_but_not_endlessly(escapes):
    options = OpenaiConfig(escape_special_tokens=escapes)
    settings = {"options": options, "special_tokens": {"<s>": 0}}

    def nested(levels):
        return conversation(arguments='{"a": ' * levels + "1" + "}" * levels)

    assert prompt("tojson", nested(100), **settings).count('{"a": ') == 100
    with pytest.raises(ApiError, match="messages") as raised:
        prompt("tojson", nested(100_000), **settings)
    assert raised.value.status == 400
    if escapes:  # which follows values as deep as Python goes
        with pytest.raises(ApiError, match="messages are nested too deeply"):
            prompt("tojson", nested(800), **settings)


def test_a_role_that_the_template_refuses_is_its_own_refusal():
    messages = [{"role": "developer", "content": "x"}, *conversation()]
    assert prompt("items", messages)
    with pytest.raises(ApiError, match="Unknown role") as raised:
        rendered("{# developer #}" + ROLES + TURNS, messages)
    assert raised.value.param == "messages"


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (parts("Fix the bug", "<env>cwd</env>"), "Fix the bug\n<env>cwd</env>"),
        (parts("a", "", "b", "c\n"), "a\nb\nc\n"),
        (parts("", "a"), "a"),
        (parts("a"), "a"),
        (parts("", ""), ""),
        ([], ""),
        ([{"type": "refusal", "refusal": "no"}, *parts("b")], "no\nb"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_a_message_are_lines(role, content, text):
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    assert rendered(source, [{"role": role, "content": content}]) == f"{text}|"
