"""Calls read from a text, whole and letter by letter (``test_openai_variations`` has more)."""

import json
import pickle

import pytest

from backend.openai_frontend.call_bodies import Call, PythonNotation, as_value
from backend.openai_frontend.calls import FORMATS, CallReader, call_format
from backend.openai_frontend.choices import CHAT, COMPLETION, Style, TextChoice
from backend.openai_frontend.reading import Channels
from backend.openai_frontend.triton import Piece

(
    GLM,
    CODER,
    HERMES,
    DEEPSEEK,
    MISTRAL_ARGS,
    FUNCTION_GEMMA,
    MISTRAL,
    GEMMA,
    PYTHONIC,
    GEMMA_JSON,
    LLAMA,
) = FORMATS
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
}
NAMES = {"clock": None, "weather": WEATHER_SCHEMA}
CLOCK, WEATHER = Call("clock", "{}"), Call("weather", '{"city": "Köln </b>"}')
ASKS = '{"name": "weather", "arguments": {"city": "Köln </b>"}}'

TEXTS = [
    (HERMES, f"Let me see.\n<tool_call>{ASKS}</tool_call>\n", "Let me see.", [WEATHER]),
    (
        HERMES,
        f'<tool_call>{ASKS}</tool_call>\n<tool_call>\n{{"name": "clock"}}\n</tool_call>',
        "",
        [WEATHER, CLOCK],
    ),
    (
        HERMES,
        f'<tool_call>[{ASKS}, {{"name": "clock", "arguments": "{{}}"}}]</tool_call>',
        "",
        [WEATHER, CLOCK],
    ),
    (HERMES, "a <tool_call>no</tool_call> b", "a <tool_call>no</tool_call> b", []),
    (
        HERMES,
        '<tool_call>{"name": "other"}</tool_call>',
        '<tool_call>{"name": "other"}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call>{"name": "clock", "argu', '<tool_call>{"name": "clock", "argu', []),
    (HERMES, " 1 < 2 <tool <tool_ca ", " 1 < 2 <tool <tool_ca ", []),
    (HERMES, ASKS, ASKS, []),
    (HERMES, "", "", []),
    (LLAMA, f'<|python_tag|>{ASKS}; {{"name": "clock", "parameters": {{}}}}', "", [WEATHER, CLOCK]),
    (LLAMA, f"\n {ASKS} that was it", f"\n {ASKS} that was it", []),
    (LLAMA, '{"temperature": 5}', '{"temperature": 5}', []),
    (LLAMA, "{ not JSON", "{ not JSON", []),
    (LLAMA, f"It is {ASKS}", f"It is {ASKS}", []),
    (MISTRAL, f' [{ASKS}, {{"name": "clock", "arguments": {{}}}}]', "", [WEATHER, CLOCK]),
    (MISTRAL, "[1] is a source, [TOOL", "[1] is a source, [TOOL", []),
    (MISTRAL, "  ", "  ", []),
    (
        GLM,
        "Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln </b></arg_value>"
        "\n</tool_call>\n<tool_call>clock\n</tool_call>\n",
        "Let me see.",
        [WEATHER, CLOCK],
    ),
    (
        GLM,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>5</arg_value>"
        "<arg_key>days</arg_key><arg_value>[1]</arg_value></tool_call>",
        "",
        [Call("weather", '{"city": "5", "days": [1]}')],
    ),
    *(
        (GLM, text, text, [])
        for text in (
            "<tool_call>other\n</tool_call>",
            "<tool_call>clock and more</tool_call>",
            "a <tool_call> b",
        )
    ),
    (
        CODER,
        "<tool_call><function=weather><parameter=city>\n\na\n\n</parameter></function>",
        "",
        [Call("weather", '{"city": "\\na\\n"}')],
    ),
    (
        GEMMA,
        "Let me see.\n```tool_code\nweather(city='Köln </b>')\n```\nSo.",
        "Let me see.\nSo.",
        [WEATHER],
    ),
    (GEMMA, "```python\nclock()\n```", "```python\nclock()\n```", []),
    *(
        (GEMMA, f"```tool_code\n{code}\n```", f"```tool_code\n{code}\n```", [])
        for code in ("print(clock())", "clock", "clock(1)", "weather(city=x)", "weather(**{})", "")
    ),
    (PYTHONIC, "[1] says it", "[1] says it", []),
    (GEMMA_JSON, "```json\n{}\n```", "```json\n{}\n```", []),
    (GEMMA_JSON, "```python\nclock()\n```", "```python\nclock()\n```", []),
    (
        DEEPSEEK,
        "Let me see.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Köln </b>"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me see.",
        [WEATHER, CLOCK],
    ),
    *(
        (DEEPSEEK, f"<｜tool▁calls▁begin｜>{text}", f"<｜tool▁calls▁begin｜>{text}", [])
        for text in (
            "<｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>[]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>more<｜tool▁calls▁end｜>",
        )
    ),
    (
        MISTRAL_ARGS,
        'See:[TOOL_CALLS]weather[ARGS]{"city": "Köln </b>"}[TOOL_CALLS]clock[CALL_ID]a1[ARGS]{}',
        "See:",
        [WEATHER, CLOCK],
    ),
    (
        MISTRAL_ARGS,
        '[TOOL_CALLS]weather[ARGS]{"city": "{}[TOOL_CALLS]"}',
        "",
        [Call("weather", '{"city": "{}[TOOL_CALLS]"}')],
    ),
    (MISTRAL_ARGS, '[TOOL_CALLS]weather[ARGS]{"ci', '[TOOL_CALLS]weather[ARGS]{"ci', []),
    (MISTRAL_ARGS, "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]clock[ARGS]{} so", "[TOOL_CALLS]clock[ARGS]{} so", []),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>a,b:{<escape>,days:[1,{of:true}]}"
        "<end_function_call>",
        "",
        [Call("weather", '{"city": "a,b:{", "days": [1, {"of": true}]}')],
    ),
    *(
        (FUNCTION_GEMMA, text, text, [])
        for text in (
            "<start_function_call>call:other{}<end_function_call>",
            "<start_function_call>call:weather{city:<escape>a}<end_function_call>",
            "<start_function_call>clock{}<end_function_call>",
        )
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_text_has_its_calls(form, text, content, calls, whole):
    pieces = [text] if whole else text
    reader = CallReader(form, NAMES)
    found = [reader.read(piece, ended=False) for piece in pieces] + [reader.read("", ended=True)]
    assert "".join(part for part, _ in found) == content
    assert [call for _, some in found for call in some] == calls
    for at in range(1, len(found)):  # what was sent is never more than the content's beginning
        assert content.startswith("".join(part for part, _ in found[:at]))


def test_plain_text_is_not_held_back():
    reader = CallReader(HERMES, NAMES)
    assert [reader.read(word, ended=False)[0] for word in ("It", " is", " five")] == [
        "It",
        " is",
        " five",
    ]
    reader = CallReader(LLAMA, NAMES)
    assert [reader.read(word, ended=False)[0] for word in ("It", " is", " {")] == [
        "It",
        " is",
        " {",
    ]


TEMPLATES = {
    "{% for tool in tools %}{{ tool | tojson }}{% endfor "
    "%}<tool_call>\n{...}\n</tool_call>": HERMES,
    '{% if tools %}Respond in the format {"name": function name, "parameters": '
    "dictionary of argument name and its value}.": LLAMA,
    "{% if builtin_tools %}{{ '<|python_tag|>' }}{% endif %}": LLAMA,
    "[AVAILABLE_TOOLS] {{ tools }}[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS] [' }}": MISTRAL,
    "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}": MISTRAL_ARGS,
    "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}": DEEPSEEK,
    "{{ tools }}<start_function_call>call:{{ name }}": FUNCTION_GEMMA,
    "{{ tools }}<tool_call>\n<function=name>\n<parameter=city>": CODER,
    "{{ tools }}<tool_call>\n<function=name>{json}</function>": None,
    "{{ tools }}<tool_call>name\n<arg_key>city</arg_key>": GLM,
    "<start_of_turn>{{ tools }} in a block ```tool_code": GEMMA,
    "<start_of_turn>{{ tools }} as [func_name1(params_name1=params_value1)]": PYTHONIC,
    '<start_of_turn>{{ tools }} {"name": function name, "parameters": dictionary of argument '
    "name and its value}": GEMMA_JSON,
    "{{ messages[0].content }}<tool_call>": None,
    "{% for tool in tools %}{{ tool }}{% endfor %}": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_format_of_calls_is_known_by_the_chat_template(template):
    assert call_format(template) == TEMPLATES[template]


def test_a_streamed_call_leaks_no_text_and_only_the_first_is_given_where_one_is_wanted():
    text = f"See:\n<tool_call>{ASKS}</tool_call><tool_call>{ASKS}</tool_call>"
    for parallel in (True, False):
        choice = TextChoice(Style(CHAT, calls=HERMES, functions=NAMES, parallel=parallel), 0)
        events = []
        for at, letter in enumerate(text):
            choice.add(Piece(0, 0, letter, "end_id" if at == len(text) - 1 else None))
            events.append(choice.part())
        deltas = [event["delta"] for event in events if event is not None]
        assert "".join(delta.get("content", "") for delta in deltas) == "See:"
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0, 1][: 1 + parallel]
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln </b>"}
        assert events[-1]["finish_reason"] == "tool_calls"


def test_a_text_that_was_cut_in_a_call_is_content_and_says_so():
    choice = TextChoice(Style(CHAT, calls=HERMES, functions=NAMES), 0)
    choice.add(Piece(0, 0, '<tool_call>{"name": "cl', "length"))
    assert choice.whole()["message"] == {"role": "assistant", "content": '<tool_call>{"name": "cl'}
    assert choice.whole()["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("reason", "is_call"), [("length", False), ("end_id", True), ("stop_words", True)]
)
def test_arguments_that_may_be_missing_are_so_only_where_the_text_was_cut(reason, is_call):
    text = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n"
    choice = TextChoice(Style(CHAT, calls=GLM, functions=NAMES), 0)
    choice.add(Piece(0, 0, text, reason))
    message = choice.whole()["message"]
    assert (message["content"], "tool_calls" in message) == (None if is_call else text, is_call)


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
@pytest.mark.parametrize("seed", [2**64 - 1, None])
def test_a_text_s_seed_comes_with_its_end(kind, seed):
    choice, named = TextChoice(Style(kind), 0), {} if seed is None else {"seed": seed}
    choice.add(Piece(0, 0, "a"))
    assert "seed" not in choice.part()
    choice.add(Piece(0, 0, "b", "length", seed=seed))
    for made in (choice.part(), choice.whole()):
        assert {name: made[name] for name in made if name == "seed"} == named


def joined(deltas):
    """Return the message that a client puts together of deltas."""
    calls = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
        for name in known:
            known[name] += call["function"].get(name, "")
    return "".join(delta.get("content") or "" for delta in deltas), [*calls.values()]


FORCED = '{"city": "Köln </b>", "days": [1, 2]}'
AROUND = f"See:\n<tool_call>{ASKS}</tool_call> \n and <tool_call>{ASKS}</tool_call> \n that \n"
STYLES = [
    ({"calls": HERMES, "functions": NAMES}, AROUND),
    *(({"calls": form, "functions": NAMES}, text) for form, text, _, _ in TEXTS),
    ({"tool": "weather"}, FORCED),
    ({"tool": ""}, f'{{"name": "weather", "parameters": {FORCED}}}'),
    ({"tool": ""}, f'{{"name": "weather", "arguments": {FORCED}}}'),
]


@pytest.mark.parametrize("letters", range(1, 9))
@pytest.mark.parametrize("reason", ["end_id", "length"])
def test_the_deltas_of_a_stream_are_the_unstreamed_message_however_many_letters_a_step_brings(
    letters, reason
):
    """A step that accepts many tokens brings them as one piece (vLLM #41967, SGLang #31915)."""
    for style, text in STYLES:
        cuts = range(0, len(text), letters)
        pieces = [Piece(0, 0, text[at : at + letters], None) for at in cuts]
        pieces.append(Piece(0, 0, "", reason))
        stream, whole = (TextChoice(Style(CHAT, **style), 0) for _ in range(2))
        events = []
        for piece in pieces:
            stream.add(piece)
            events.append(stream.part())
            whole.add(piece)
        reply = whole.whole()
        message = reply["message"]
        calls = [
            {name: call["function"][name] for name in ("name", "arguments")}
            for call in message.get("tool_calls", ())
        ]
        events = [event for event in events if event is not None]
        content, found = joined([event["delta"] for event in events])
        assert (content, found) == (message["content"] or "", calls), text
        assert events[-1]["finish_reason"] == reply["finish_reason"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", None, 5),
        ("five", None, "five"),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ('"5"', {"anyOf": [{"type": "integer"}, {"type": "string"}]}, '"5"'),
        ("5", {"enum": ["4", "5"]}, "5"),
        ("5", {"enum": [4, 5]}, 5),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("5", {"type": 3}, 5),
        ("5", {"anyOf": "x", "enum": 7}, 5),
    ],
)
def test_a_text_without_quotes_is_what_its_schema_says(text, schema, value):
    assert as_value(text, schema) == value


@pytest.mark.parametrize(
    "code",
    [
        "clock(" * 10_000,
        "clock(" + "-" * 100_000 + "1)",
        "clock(a=" + "[" * 10_000,
        "weather(city={1, 2})",
        "weather(city=1e999)",
        "weather(city=b'a')",
        "weather(city='a', city='b')",
        "weather('a', city='b')",
        "a.clock()",
        "clock(\0)",
    ],
)
def test_code_that_is_no_call_is_none(code):
    assert PythonNotation().calls(code, NAMES) is None


def test_code_is_read_without_a_warning():
    assert PythonNotation().calls(r"weather(city='\d')", NAMES) == [
        Call("weather", json.dumps({"city": r"\d"}))
    ]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_style_goes_to_another_process_as_that_of_a_large_body_does(form):
    style = Style(CHAT, calls=form, functions=NAMES, frame=Channels(True))
    assert pickle.loads(pickle.dumps(style)) == style
