"""Chats of reasoning models through the route: what the template marks, streamed and not."""

import json

import pytest

from backend.config import OpenaiConfig
from backend.openai_frontend.errors import CHAT_FIELDS, TOOL_FIELDS, upstream_error
from backend.request import RequestError
from backend.sampling.guides import Grammars
from backend.tokenizer import ByteTokenizer
from tests.fakes.chats import HI, chat, message_of

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
PLAIN = TURNS
QWEN = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    + TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
R1 = TURNS + "<think>\n{# content.split('</think>') #}"
TEXT = "<think>\nHm, é.\n</think>\n\nYes."
UNSPLIT = OpenaiConfig(split_reasoning=False)
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("letters", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("template", "text", "body", "reasoning", "content"),
    [
        (QWEN, TEXT, {}, "Hm, é.", "Yes."),
        (QWEN, "Yes.", {}, None, "Yes."),
        (QWEN, TEXT, {"chat_template_kwargs": {"enable_thinking": False}}, "absent", TEXT),
        (QWEN, TEXT, {"reasoning_effort": "none"}, "absent", TEXT),
        (QWEN, TEXT, {"separate_reasoning": False}, "absent", TEXT),
        (QWEN, TEXT, {"settings": {"options": UNSPLIT}}, "absent", TEXT),
        (QWEN, TEXT, {"include_reasoning": False}, "absent", "Yes."),
        (R1, TEXT.removeprefix("<think>"), {}, "Hm, é.", "Yes."),
        (R1, "Hm, </thi", {"reason": "length"}, "Hm, </thi", ""),
        (PLAIN, TEXT, {}, "absent", TEXT),
    ],
)
def test_reasoning_is_apart_from_the_content(
    template, text, body, reasoning, content, letters, stream
):
    _, answer = chat(template, text, letters=letters, stream=stream, **body)
    message = message_of(answer)
    assert (message["role"], message["content"]) == ("assistant", content)
    assert message["finish_reason"] == ("length" if "reason" in body else "stop")
    wanted = reasoning
    if stream and reasoning is None:
        wanted = "absent"
    assert message.get("reasoning_content", "absent") == wanted
    assert message.get("reasoning", "absent") == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_calls_follow_reasoning_and_what_looks_like_one_in_it_is_none(stream):
    called = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    _, answer = chat(
        QWEN, f"<think>I may {called}</think>\nNow: {called}", tools=TOOLS, stream=stream
    )
    message = message_of(answer)
    assert message["reasoning_content"] == f"I may {called}"
    assert message["content"] == "Now:"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]
    assert message["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "calls"),
    [
        ("Hm.</think>{}", "end_id", ["{}"]),
        ("Hm.</think>", "length", []),
        ("Hm.", "length", []),
    ],
)
def test_a_call_that_must_come_follows_reasoning(text, reason, calls, stream):
    choice = {"type": "function", "function": {"name": "clock"}}
    _, answer = chat(R1, text, tools=TOOLS, tool_choice=choice, stream=stream, reason=reason)
    message = message_of(answer)
    assert message["reasoning_content"] == "Hm."
    found = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    assert found == calls


SHOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + TURNS
ASKED = '{"name": "book", "arguments": {"seat": "5", "rows": [1]}}'
BOOK = {
    "type": "object",
    "properties": {"seat": {"type": "string"}, "rows": {"type": "array"}},
}
FORMATS = {
    "Hermes": ("<tool_call>", f"<tool_call>\n{ASKED}\n</tool_call>"),
    "GLM 4.5": (
        "<arg_key>",
        "<tool_call>book\n<arg_key>seat</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>rows</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
    ),
    "Qwen3-Coder": (
        "<function= <parameter=",
        "<tool_call>\n<function=book>\n<parameter=seat>\n5\n</parameter>\n<parameter=rows>\n[1]\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "Gemma 3": ("```tool_code", "```tool_code\nbook(seat='5', rows=[1])\n```"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("letters", [1, 4, 1000])
def test_calls_of_every_format_are_read_and_no_mark_leaks(name, letters, stream):
    marks, call = FORMATS[name]
    tools = [*TOOLS, {"type": "function", "function": {"name": "book", "parameters": BOOK}}]
    template = SHOWS + "{# </think> " + marks + " #}"
    text = f"<think>Hm.</think>See:\n{call}\n{call}"
    _, answer = chat(template, text, letters=letters, tools=tools, stream=stream)
    message = message_of(answer)
    assert (message["reasoning"], message["content"]) == ("Hm.", "See:")
    called = [call["function"] for call in message["tool_calls"]]
    assert [function["name"] for function in called] == ["book", "book"]
    assert [json.loads(function["arguments"]) for function in called] == [
        {"seat": "5", "rows": [1]}
    ] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert message["finish_reason"] == "tool_calls"
    _, answer = chat(template, text.replace("book", "look"), letters=letters, tools=tools)
    assert message_of(answer)["content"] == text.partition("</think>")[2].replace("book", "look")


BYTES = ByteTokenizer()
GRAMMARS = Grammars(BYTES)
(END,) = BYTES.end_ids
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {**SCHEMA, "title": "x"}}}
CALLED = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '{"name": "f", "parameters": {"a": 1}}'


def allows(options, text):
    guide = GRAMMARS.guide(
        options["guided_decoding_guide_type"], options["guided_decoding_guide"], BYTES.end_ids
    )
    tokens = [*text.encode(), END]
    return guide.count_allowed([], tokens) == len(tokens)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"response_format": FORMAT}, '{"a": 1}'),
        ({"response_format": {"type": "json_object"}}, '{"b": [1]}'),
        ({"tools": [*TOOLS, CALLED], "tool_choice": "required"}, CALL),
        ({"tools": [*TOOLS, CALLED], "tool_choice": NAMED}, '{"a": 1}'),
    ],
)
def test_a_grammar_constrains_what_follows_the_reasoning(body, answer):
    def of(template, **more):
        return chat(template, "", **body, **more)[0].options

    thought, rest = "Hm, {é}\n\n", f"</think>\n\n{answer}"
    for template, begun in ((R1, ""), (R1, "<think>"), (QWEN, "<think>"), (QWEN, "\n<think>")):
        assert allows(of(template), begun + thought + rest)
        assert not allows(of(template), begun + thought)
        assert not allows(of(template), begun + thought + "</think>Yes")
        assert not allows(of(template), begun + thought + rest + "</think>")
    assert allows(of(QWEN), answer)
    assert not allows(of(R1), answer)
    for plain in (of(PLAIN), of(QWEN, reasoning_effort="none"), of(R1, separate_reasoning=False)):
        assert allows(plain, answer)
        assert not allows(plain, f"<think>{thought}{rest}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        (
            {
                "tools": [
                    *TOOLS,
                    {**CALLED, "function": {"name": "f", "parameters": {"type": "x"}}},
                ],
                "tool_choice": NAMED,
            },
            "tools[1].function.parameters",
        ),
    ],
)
def test_a_schema_that_cannot_be_served_is_named_with_reasoning_too(body, field):
    options = chat(R1, "", **body)[0].options
    with pytest.raises(RequestError) as raised:
        allows(options, "")
    error = upstream_error(
        400, raised.value.message, TOOL_FIELDS if "tools" in body else CHAT_FIELDS
    )
    assert error.param == field
    assert "Invalid type: x" in str(error)


def test_reasoning_of_an_earlier_answer_reaches_the_template():
    shows = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        earlier = {"role": "assistant", "content": None, name: "Hm."}
        triton, _ = chat(shows, "", messages=[*HI, earlier])
        assert triton.prompts == ["|hiHm.|"]
