"""Messages on channels."""

import json

import pytest

from backend.openai_frontend.call_bodies import Call
from backend.openai_frontend.reading import ChannelReader, has_channels
from backend.sampling.guides import Grammars
from backend.tokenizer import ByteTokenizer
from tests.fakes.chats import HI, chat, message_of

FUNCTIONS = {"clock": None, "weather": {"properties": {"city": {"type": "string"}}}}
ANALYSIS = "<|channel|>analysis<|message|>Hm, 1 < 2 <| é.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ASKS = '{"city": "Köln"}'
WEATHER, CLOCK = Call("weather", ASKS), Call("clock", "{}")
TEXTS = [
    (ANALYSIS + FINAL + "Yes.", "Hm, 1 < 2 <| é.", "Yes.", []),
    (ANALYSIS + FINAL + "Yes.<|return|>", "Hm, 1 < 2 <| é.", "Yes.", []),
    ("<|channel|>final<|message|>Yes.", "", "Yes.", []),
    (ANALYSIS + "<|start|>assistant" + TO + ASKS, "Hm, 1 < 2 <| é.", "", [WEATHER]),
    (TO + ASKS + "<|call|><|start|>assistant" + TO + ASKS, "", "", [WEATHER, WEATHER]),
    (f" to=functions.weather<|channel|>commentary json<|message|>{ASKS}", "", "", [WEATHER]),
    ("<|channel|>analysis to=functions.clock code<|message|>{}", "", "", [CLOCK]),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + TO + ASKS,
        "",
        "I look.",
        [WEATHER],
    ),
    (ANALYSIS + "<|start|>assistant" + ANALYSIS, "Hm, 1 < 2 <| é.\nHm, 1 < 2 <| é.", "", []),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", []),
    ("<|channel|>analysis<|message|>cut <|en", "cut <|en", "", []),
    ("<|channel|>anal", "", "", []),
    (ANALYSIS + "<|start|>assist", "Hm, 1 < 2 <| é.", "", []),
    (" plain text <|x", "", " plain text <|x", []),
    ("to be", "", "to be", []),
    ("to<|message|>be", "", "to<|message|>be", []),
    ("<|channel|><|ca<|message|>a", "", "<|channel|><|ca<|message|>a", []),
    *(
        (f"<|channel|>{'x' * letters}<|message|>a", "", content, [])
        for letters, content in ((189, "a"), (190, f"<|channel|>{'x' * 190}<|message|>a"))
    ),
    ("", "", "", []),
    *(
        (text, "", text, [])
        for text in (
            TO + '{"city": ',
            TO + "[]",
            TO + "no<|call|>",
            TO.replace("functions.weather", "functions.other") + "{}",
            TO.replace("functions.weather", "browser.search") + "{}",
        )
    ),
]


def read(text, cuts, **options):
    """Return what a text that comes in pieces brings, piece by piece."""
    reader = ChannelReader(FUNCTIONS, **options)
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [reader.read(piece, ended=False) for piece in pieces] + [reader.read("", ended=True)]


def joined(parts):
    """Return the parts as one: reasoning, content, calls."""
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [call for part in parts for call in part.calls],
    )


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), TEXTS)
def test_a_text_has_its_parts(text, reasoning, content, calls):
    """Whole, and letter by letter."""
    for cuts in ([], range(1, len(text))):
        assert joined(read(text, cuts)) == (reasoning, content, calls)


def test_bodies_come_as_they_are_written():
    text = ANALYSIS + FINAL + "Yes, it is."
    parts = read(text, range(1, len(text)))
    assert max(len(part.reasoning + part.content) for part in parts) <= 3
    shown = [part for part in parts if part]
    assert not shown[0].content
    assert not shown[-1].reasoning


def test_reasoning_that_is_not_wanted_apart_is_content():
    content = "Hm, 1 < 2 <| é.\nYes."
    assert joined(read(ANALYSIS + FINAL + "Yes.", [], splits=False)) == ("", content, [])


TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}"
    "<|start|>{{ m.role }}<|channel|>{{ m.thinking }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
NAMES = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>"]
SPECIAL = {name: 256 + at for at, name in enumerate([*NAMES, "<|constrain|>"])}
TOOLS = [
    {"type": "function", "function": {"name": "clock"}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
]
WANTS_WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("letters", [1, 3, 1000])
def test_a_chat_has_the_parts_of_its_messages(stream, letters):
    text = ANALYSIS + "<|start|>assistant" + TO + ASKS
    for more in ({}, {"tool_choice": WANTS_WEATHER}, {"tool_choice": "required"}):
        triton, answer = chat(
            TEMPLATE,
            text,
            letters=letters,
            stream=stream,
            tools=TOOLS,
            reasoning_effort="high",
            settings={"special_tokens": SPECIAL},
            **more,
        )
        assert "Reasoning: high" in triton.prompts[0]
        assert triton.options["skip_special_tokens"] is False
        message = message_of(answer)
        assert message["reasoning_content"] == message["reasoning"] == "Hm, 1 < 2 <| é."
        assert not message["content"]
        assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [
            {"city": "Köln"}
        ]
        assert message["finish_reason"] == "tool_calls"


def test_an_answer_is_a_message_of_the_next_request():
    called = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    for content in ("See:", None):
        answer = {"role": "assistant", "content": content, "tool_calls": [called]}
        answer["reasoning"] = "Hm."
        triton, _ = chat(TEMPLATE, "", messages=[*HI, answer])
        assert ("Hm." in triton.prompts[0]) == (content is None)


SPECIAL_TOKENIZER = ByteTokenizer(
    vocab_size=256 + len(SPECIAL),
    token_bytes=(*(bytes([value]) for value in range(256)), *[b""] * len(SPECIAL)),
    end_id=SPECIAL["<|return|>"],
    end_ids=frozenset({SPECIAL["<|return|>"], SPECIAL["<|call|>"]}),
    special_tokens=SPECIAL,
)


def tokens_of(text, special):
    """Return a text's tokens: bytes, and special ones by their names."""
    tokens = []
    while text:
        name = next((name for name in special if text.startswith(name)), None)
        tokens += [special[name]] if name else list(text[0].encode())
        text = text[len(name or text[0]) :]
    return tokens


@pytest.mark.parametrize("special", [SPECIAL, {}], ids=["special", "plain"])
def test_a_grammar_constrains_the_last_message(special):
    tokenizer = SPECIAL_TOKENIZER if special else ByteTokenizer()
    grammars, end = Grammars(tokenizer), tokenizer.end_id

    def allows(text, **body):
        settings = {"special_tokens": special}
        options = chat(TEMPLATE, "", settings=settings, **body)[0].options
        guide = grammars.guide(
            options["guided_decoding_guide_type"],
            options["guided_decoding_guide"],
            tokenizer.end_ids,
        )
        tokens = [*tokens_of(text, special), end]
        return guide.count_allowed([], tokens) == len(tokens)

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    final = FINAL.removeprefix("<|start|>assistant")
    empty = "<|channel|>analysis<|message|><|end|><|start|>assistant"
    for before in ("", empty, ANALYSIS + "<|start|>assistant", (ANALYSIS + FINAL[:18]) * 2):
        assert allows(before + final + '{"a": 1}', **form), before
        assert not allows(before + final + "Yes", **form)
        assert not allows(before + TO + ASKS, **form)
        for choice in ("required", WANTS_WEATHER):
            asked = {"tools": TOOLS, "tool_choice": choice}
            assert allows(before + TO + ASKS, **asked)
            assert not allows(before + TO + "{}", **asked)
            assert not allows(before + final + "Yes", **asked)
        clock = TO.replace("weather", "clock") + "{}"
        assert allows(before + clock, tools=TOOLS, tool_choice="required")
        assert not allows(before + clock, tools=TOOLS, tool_choice=WANTS_WEATHER)


def test_channels_are_known_by_the_template():
    assert has_channels(TEMPLATE)
    assert not has_channels("{{ messages[0].content }}<|message|>")
