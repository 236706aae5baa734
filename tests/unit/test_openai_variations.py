"""Calls as models write them when they keep to their format only roughly: each is a call, however
the text is cut, and what is no call of a known function stays content letter by letter.
"""

import json

import pytest

from backend.openai_frontend.call_bodies import Call
from backend.openai_frontend.calls import FORMATS, CallReader
from backend.openai_frontend.reading import ChannelReader

FORMS = {form.name: form for form in FORMATS}
FUNCTIONS = {
    "get_time": {
        "type": "object",
        "properties": {"zone": {"type": "string"}, "o": {"type": "object"}},
    },
    "stop": None,
}
UTC = [("get_time", {"zone": "UTC"})]
BOTH = [("get_time", {"zone": "UTC", "o": {"a": 1}})]
STOP = [("stop", {})]
TWO = UTC + STOP
ZONE = '{"zone": "UTC"}'
OPEN, END = "<tool_call>", "</tool_call>"
NO_ARGUMENTS = ("null", '""', '" "', '"null"', "{}", '"{}"')
CODED = "<function=get_time>\n<parameter=zone>\nUTC\n"
GLM_ZONE = "<arg_key>zone</arg_key>\n<arg_value>UTC"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def json_calls(before="", after=""):
    """Yield calls as JSON, as several models write them."""
    for arguments in NO_ARGUMENTS:
        yield f'{before}{{"name": "stop", "arguments": {arguments}}}{after}', STOP
        yield f'{before}{{"name": "stop", "parameters": {arguments}}}{after}', STOP
    for call in (
        f'{{"name": "get_time", "arguments": {ZONE}}}',
        f'{{"name": "get_time", "parameters": {ZONE}}}',
        f'{{"name": "get_time", "arguments": {json.dumps(ZONE)}}}',
        f'{{"type": "function", "name": "get_time", "parameters": {ZONE}}}',
        f'{{"type": "function", "function": {{"name": "get_time", "parameters": {ZONE}}}}}',
        f'{{"type": "function", "function": {{"name": "get_time", "arguments": {ZONE}}}}}',
        f'{{"function": "get_time", "parameters": {ZONE}}}',
        f'{{"name": "functions.get_time", "arguments": {ZONE}}}',
        f'{{"arguments": {ZONE}, "name": "get_time", "id": "1"}}',
    ):
        yield before + call + after, UTC


VARIATIONS = {
    "Hermes": [
        *json_calls(f"{OPEN}\n", f"\n{END}"),
        *json_calls(OPEN),
        (f'{OPEN}{{"name": "get_time", "arguments": {ZONE}}}\n{OPEN}{{"name": "stop"}}{END}', TWO),
        (f'{OPEN}{{"name": "get_time", "arguments": {ZONE}}}\n{OPEN}{{"name": "stop"}}', TWO),
        (f'{OPEN}{OPEN}{{"name": "stop"}}{END}', STOP),
    ],
    "Qwen3-Coder": [
        (f"{CODED}</parameter>\n</function>\n{END}", UTC),
        (f"{CODED}</parameter>\n</function>", UTC),
        (f"{CODED}</parameter>\n{END}", UTC),
        (f"{CODED}</parameter>", UTC),
        (f"{CODED}</function>\n{END}", UTC),
        (f"{CODED}", UTC),
        (f"{OPEN}\n{CODED}</parameter>\n</function>", UTC),
        (f"{OPEN}\n{CODED}</parameter>\n{END}", UTC),
        (f"{OPEN}{CODED}</parameter></function>{END}", UTC),
        (f"{OPEN}\n{CODED}</function>\n{END}", UTC),
        (f"{OPEN}\n{CODED}{END}", UTC),
        (f'{OPEN}\n{CODED}<parameter=o>\n{{"a": 1}}\n</parameter>\n</function>\n{END}', BOTH),
        (f'{CODED}<parameter=o>\n{{"a": 1}}\n</function>', BOTH),
        (f"{OPEN}\n{CODED}</parameter></function>\n<function=stop></function>\n{END}", TWO),
        (f"{OPEN}\n{CODED}</parameter>\n<function=stop>\n{END}", TWO),
        (f"{CODED}</parameter></function>\n<function=stop></function>", TWO),
        (f"{CODED}</parameter></function>\n{END}\n{OPEN}<function=stop></function>{END}", TWO),
        (f"<seed:tool_call>\n{CODED}</parameter>\n</function>\n</seed:tool_call>", UTC),
        (f"<function=get_time>{ZONE}</function>", UTC),
        ("<function=stop></function>", STOP),
        (f"{OPEN}<function=stop>{END}", STOP),
        *json_calls(f"{OPEN}\n", f"\n{END}"),
    ],
    "GLM 4.5": [
        (f"{OPEN}get_time\n{GLM_ZONE}</arg_value>\n{END}", UTC),
        (f"{OPEN}get_time\n{GLM_ZONE}</arg_value>\n", UTC),
        (f"{OPEN}get_time\n{GLM_ZONE}\n{END}", UTC),
        (f"{OPEN}get_time{GLM_ZONE}\n", UTC),
        (f"{OPEN}get_time\n<arg_key>zone<arg_value>UTC</arg_value>{END}", UTC),
        (
            f'{OPEN}get_time\n{GLM_ZONE}\n<arg_key>o</arg_key><arg_value>{{"a": 1}}</arg_value>'
            f"{END}",
            BOTH,
        ),
        (f"{OPEN}get_time\n{GLM_ZONE}</arg_value>\n{OPEN}stop\n{END}", TWO),
        (f"{OPEN}get_time\n{ZONE}\n{END}", UTC),
        (f"{OPEN}stop", STOP),
        *json_calls(OPEN, END),
    ],
    "DeepSeek": [
        (f"{CALLS}{ONE}get_time{SEP}{ZONE}{ONE_END}{CALLS_END}", UTC),
        (f"{CALLS}{ONE}get_time{SEP}{ZONE}{ONE_END}", UTC),
        (f"{CALLS}{ONE}get_time{SEP}{ZONE}", UTC),
        (f"{ONE}get_time{SEP}{ZONE}{ONE_END}", UTC),
        (f"{ONE}get_time{SEP}{ZONE}{ONE_END}{ONE}stop{SEP}{{}}{ONE_END}{CALLS_END}", TWO),
        (f"{CALLS}{ONE}get_time{SEP}{ZONE}{ONE}stop{SEP}null{ONE_END}{CALLS_END}", TWO),
        (f"{CALLS}get_time{SEP}{ZONE}{ONE_END}{CALLS_END}", UTC),
        (f"{CALLS}{ONE}function{SEP}get_time\n```json\n{ZONE}\n```{ONE_END}{CALLS_END}", UTC),
        (f"{CALLS}{ONE}function{SEP}get_time\n{ZONE}{ONE_END}{CALLS_END}", UTC),
        (f"{CALLS}{ONE}function{SEP}get_time\n```\n{ZONE}\n```", UTC),
        *(
            (f"{mark}{ONE}function{SEP}get_time\n```json\n{ZONE}\n```{ONE_END}{CALLS_END}", UTC)
            for mark in FORMS["DeepSeek"].openings
        ),
    ],
    "Mistral, names before arguments": [
        (f"[TOOL_CALLS]get_time[ARGS]{ZONE}", UTC),
        (f"[TOOL_CALLS] get_time {ZONE}", UTC),
        (f"[TOOL_CALLS]get_time[CALL_ID]abc[ARGS]{ZONE}", UTC),
        (f"[TOOL_CALLS]get_time{ZONE}[TOOL_CALLS]stop{{}}", TWO),
        (f"[TOOL_CALLS]get_time[ARGS]{ZONE}stop[ARGS]{{}}", TWO),
        ("[TOOL_CALLS]stop[ARGS]null", STOP),
        (f'[TOOL_CALLS][{{"name": "get_time", "arguments": {ZONE}}}, {{"name": "stop"}}]', TWO),
        *json_calls("[TOOL_CALLS]"),
    ],
    "Mistral": [
        (f'[TOOL_CALLS] [{{"name": "get_time", "arguments": {ZONE}}}, {{"name": "stop"}}]', TWO),
        (f"[TOOL_CALLS]get_time[ARGS]{ZONE}", UTC),
        *json_calls("[TOOL_CALLS]"),
        *json_calls("[TOOL_CALLS] [", "]"),
        *json_calls("[", "]"),
        *json_calls(),
    ],
    "FunctionGemma": [
        ("<start_function_call>call:get_time{zone:<escape>UTC<escape>}<end_function_call>", UTC),
        ("<start_function_call>call:get_time{zone:<escape>UTC<escape>}", UTC),
        ("<start_function_call> call: get_time {zone: <escape>UTC<escape>} ", UTC),
        (f"<start_function_call>call:get_time{ZONE}<end_function_call>", UTC),
        (
            '<start_function_call>call:get_time{"zone": "UTC", o: {"a": 1}}<end_function_call>',
            BOTH,
        ),
        ("<start_function_call>call:stop{}<start_function_call>call:stop{}", STOP + STOP),
    ],
    "Gemma 3 code": [
        ('```tool_code\nget_time(zone="UTC")\n```', UTC),
        ('```tool_code\nget_time(zone="UTC")', UTC),
        ("```tool_code\ndefault_api.get_time('UTC')\n```", UTC),
        ('```tool_code\n[get_time(zone="UTC"), stop()]\n```', TWO),
        *json_calls("```tool_code\n", "\n```"),
    ],
    "Pythonic": [
        ('[get_time(zone="UTC"), stop()]', TWO),
        ('[get_time(zone="UTC"),]', UTC),
        ('get_time(zone="UTC")', UTC),
        ("get_time('UTC'), stop()", TWO),
        ("get_time('UTC')\nstop()", TWO),
        *json_calls("[", "]"),
        *json_calls(),
    ],
    "Gemma 3 JSON": [
        *json_calls("```json\n", "\n```"),
        *json_calls("```json\n"),
        *json_calls("", "\n```"),
        *json_calls(),
    ],
    "Llama 3": [*json_calls("<|python_tag|>"), *json_calls()],
}
CASES = [(name, text, calls) for name, pairs in VARIATIONS.items() for text, calls in pairs]
BEFORE_TEXT = {name for name, form in FORMS.items() if form.openings}
"""Formats whose calls follow other text."""


def outcomes(make, text, **how):
    """Yield what a reader makes of a text as a whole, cut anywhere and letter by letter."""
    cuts = [(), tuple(range(1, len(text))), *((at,) for at in range(1, len(text)))]
    for cut in cuts:
        ends = [*cut, len(text)]
        pieces = [text[low:high] for low, high in zip([0, *cut], ends, strict=True)]
        reader, content, calls = make(), "", []
        for at, piece in enumerate(pieces):
            part, more = reader.read(piece, ended=at == len(pieces) - 1, **how)
            content, calls = content + part, calls + more
        yield content, [(call.name, json.loads(call.arguments)) for call in calls]


def reader_of(name):
    return lambda: CallReader(FORMS[name], FUNCTIONS)


@pytest.mark.parametrize(("name", "text", "calls"), CASES)
def test_a_call_that_is_written_a_little_otherwise_is_one(name, text, calls):
    assert all(found == ("", calls) for found in outcomes(reader_of(name), text))
    if name in BEFORE_TEXT and any(text.startswith(mark) for mark in FORMS[name].openings):
        (whole, *_) = outcomes(reader_of(name), f"Let me see. \n{text}")
        assert whole == ("Let me see.", calls)


@pytest.mark.parametrize(("name", "text", "calls"), CASES)
def test_a_call_of_no_known_function_is_content_letter_by_letter(name, text, calls):
    del calls
    text = text.replace("get_time", "other").replace("stop", "halt")
    assert all(found == (text, []) for found in outcomes(reader_of(name), text))


CUT = [
    ("Qwen3-Coder", f"{OPEN}\n{CODED}"),
    ("Qwen3-Coder", f"{CODED}</parameter>\n"),
    ("Qwen3-Coder", "<function=stop>"),
    ("GLM 4.5", f"{OPEN}get_time\n{GLM_ZONE}</arg_value>\n"),
    ("GLM 4.5", f"{OPEN}stop\n"),
    ("Hermes", f'{OPEN}{{"name": "stop", "argu'),
    ("DeepSeek", f"{CALLS}{ONE}stop{SEP}"),
    ("FunctionGemma", "<start_function_call>call:get_time{zone:<escape>UTC<escape>"),
    ("Mistral", '[TOOL_CALLS] [{"name": "stop"}'),
    ("Llama 3", '{"name": "stop", "parameters": {}'),
]


@pytest.mark.parametrize(("name", "text"), CUT)
def test_a_text_that_was_cut_in_a_call_has_none(name, text):
    assert all(found == (text, []) for found in outcomes(reader_of(name), text, cut=True))


KEPT = [  # values that look like marks are values
    ("Qwen3-Coder", "<parameter=zone>\na <parameter=x> b\n</parameter>", "a <parameter=x> b"),
    ("Qwen3-Coder", "<parameter=zone>\n<parameter=zone> b\n</parameter>", "<parameter=zone> b"),
    (
        "GLM 4.5",
        "<arg_key>zone</arg_key><arg_value><arg_key>x</arg_key></arg_value>",
        "<arg_key>x</arg_key>",
    ),
    ("Hermes", "<tool_call> {}", "<tool_call> {}"),
]


@pytest.mark.parametrize(("name", "body", "value"), KEPT)
def test_marks_in_a_value_are_part_of_it(name, body, value):
    text = {
        "Qwen3-Coder": f"{OPEN}<function=get_time>{body}</function>{END}",
        "GLM 4.5": f"{OPEN}get_time\n{body}{END}",
        "Hermes": f'{OPEN}{{"name": "get_time", "arguments": {{"zone": "{body}"}}}}{END}',
    }[name]
    found = list(outcomes(reader_of(name), text))
    assert all(each == ("", [("get_time", {"zone": value})]) for each in found)


@pytest.mark.parametrize("body", ["", " \n", "null", "{}"])
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
def test_a_call_on_a_channel_may_have_no_arguments(body, end):
    text = f"<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{body}{end}"
    parts = ChannelReader(FUNCTIONS).read(text, ended=True)
    assert (parts.content, parts.calls) == ("", [Call("stop", "{}")])
    if not body.strip() and not end:
        assert not ChannelReader(FUNCTIONS).read(text, ended=True, cut=True).calls


def test_arguments_with_half_a_surrogate_pair_are_text():
    text = f'{OPEN}{{"name": "get_time", "arguments": {{"zone": "\\ud83d"}}}}{END}'
    (_, [call]) = CallReader(FORMS["Hermes"], FUNCTIONS).read(text, ended=True)
    assert call.arguments.encode() == b'{"zone": "\\ud83d"}'
