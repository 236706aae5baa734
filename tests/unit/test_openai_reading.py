"""Readers of texts: every cut gives the same, and no text takes more than a step for each letter.

Models write what their prompts ask for, so that a client can choose the text that is read.
"""

import importlib
import re
from functools import partial
from re import _compiler as compiler
from re import _constants as codes
from re import _parser as parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.openai_frontend.calls import FORMATS, CallReader
from backend.openai_frontend.reading import FORMATS as REASONING
from backend.openai_frontend.reading import ChannelReader, ForcedCallReader, Reader, Reasoning
from tests.fakes.steps import steps_of

FUNCTIONS = {
    "f": None,
    "g": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}},
}
READERS = {
    **{form.name: partial(CallReader, form, FUNCTIONS) for form in FORMATS},
    "channels": partial(ChannelReader, FUNCTIONS),
    "forced": partial(ForcedCallReader, ""),
    **{
        f"{form.opening} {is_open}": partial(
            Reader, Reasoning(form, is_open), CallReader(FORMATS[2], FUNCTIONS)
        )
        for form in REASONING
        for is_open in (False, True)
    },
}


def reader_of(name):
    reader = READERS[name]()
    if isinstance(reader, Reader):
        reader = Reader(READERS[name].args[0], CallReader(FORMATS[2], FUNCTIONS))
    return reader


def read(name, pieces, **how):
    """Return the reasoning, content and calls of a text in pieces."""
    reader, parts = reader_of(name), []
    for at, piece in enumerate(pieces):
        made = reader.read(piece, ended=at == len(pieces) - 1, **how)
        parts.append(("", *made) if isinstance(made, tuple) else made)
    columns = [
        (part if isinstance(part, tuple) else (part.reasoning, part.content, part.calls))
        for part in parts
    ]
    reasoning, content, calls = zip(*columns, strict=True)
    return "".join(reasoning), "".join(content), [call for some in calls for call in some]


MARKS = sorted(
    {mark for form in FORMATS for mark in (*form.openings, *form.closings)}
    | {mark for form in REASONING for mark in (form.opening, form.closing)}
    | {"<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}
    | {"<escape>", "call:f", "[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```"}
    | {"<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "analysis", "to=f"}
)
CALLS = ['{"name": "f"}', '[{"name": "g", "arguments": {"a": "1"}}]', "f()", 'g(a="1")', "f>", "{}"]
LETTERS = [" ", "\n", "\t", "f", "g", "a", '"', "\\", "{", "}", "[", "]", "(", ":", ",", "<", "é"]


@pytest.mark.medium
@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_every_cut_of_any_text_is_read_the_same(name, data):
    fragments = st.one_of(*map(st.sampled_from, (MARKS, CALLS, LETTERS)))
    text = "".join(data.draw(st.lists(fragments, max_size=12)))
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    how = {"cut": data.draw(st.booleans())}
    whole = read(name, [text], **how)
    assert read(name, [*text, ""], **how) == whole
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    pieces = [text[low:high] for low, high in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert read(name, pieces, **how) == whole
    reasoning, content, calls = whole
    assert calls or name == "channels" or len(reasoning) + len(content) <= len(text)


def after(head, unit, tail=""):
    """Return what makes a text of about a number of letters, most of them the unit's."""
    return lambda letters: head + unit * (letters // len(unit)) + tail


TEXTS = {
    "blanks": after("", " "),
    "blanks after text": after("a", " ", "b"),
    "a list": after('[{"', "a"),
    "an object": after('{"', "a"),
    "brackets": after("", "["),
    "braces": after("", '{"a":'),
    "quotes": after('{"a": ', '"\\"'),
    "python": after("[f(", "a, "),
    "code": after("```tool_code\n", "f()\n", "```"),
    "headers": after("", "<|channel|>final<|message|>a<|end|>"),
    "a header": after("<|channel|>", " a"),
    "an unended call": after("<|channel|>commentary to=functions.f<|message|>", "{ "),
    "blanks in a call": after("<|channel|>commentary to=functions.f<|message|>{}", " "),
    "thoughts": after("<think>", "a ", "</think>"),
    "blank thoughts": after("<think>", " ", "</think>"),
    "answer after blanks": after("<think></think>", " ", "a"),
    **{f"many {mark}": after("", mark) for mark in MARKS},
    **{f"blanks after {mark}": after(mark, " ", "x") for mark in MARKS},
    **{f"letters after {mark}": after(mark, "a<") for mark in MARKS},
    "blank key": after("<tool_call>g<arg_key>", " ", "</tool_call>"),
    "keys": after("<tool_call>g", "<arg_key>a</arg_key>", "</tool_call>"),
    "values": after("<tool_call>g", "<arg_key>a</arg_key> <arg_value>", "</tool_call>"),
    "parameters": after("<function=g>", "<parameter=a>b\n", "</function>"),
    "a parameter": after("<function=g><parameter=a>", "<parameter=x>", "</function>"),
    "names": after("[TOOL_CALLS]", "f "),
    "calls": after("[TOOL_CALLS]", "f[ARGS]{}"),
    "objects": after("<tool_call>", '{"name": "f"}', "</tool_call>"),
    "pairs": after("", '<tool_call>{"name": "f"}</tool_call> '),
    "broken pairs": after("", '<tool_call>{"name": "h"}</tool_call> '),
    "bare keys": after("<start_function_call>call:f{", "a:{b ", "}<end_function_call>"),
    "escapes": after("<start_function_call>call:f{", '"\\', "}<end_function_call>"),
    "DeepSeek": after("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} "),
}
LETTERS_READ = 2000


def concerns(name, text):
    """Return whether a reader looks for what a text has, or may hold it back from the start."""
    form = next((form for form in FORMATS if form.name == name), None)
    looked_for = form.openings if form else ("<|" if name == "channels" else "<think>",)
    begins = (" " * 99, "a" * 99, *(form.begins if form else "{"))
    return text.startswith(begins) or any(mark in text for mark in looked_for)


@pytest.mark.parametrize("pieces", [20, 1])
@pytest.mark.parametrize("name", [name for name in READERS if not name.startswith("<seed")])
@pytest.mark.medium
def test_twice_the_text_is_at_most_two_and_a_half_times_the_steps(name, pieces):
    def steps(text, size):
        cuts = range(0, len(text), size)
        return steps_of(lambda: read(name, [text[at : at + size] for at in cuts]))

    read(name, ["a"])  # what is made once
    for kind, make in TEXTS.items():
        once, twice = make(LETTERS_READ), make(2 * LETTERS_READ)
        if concerns(name, once):
            size = len(once) // pieces if pieces > 1 else len(twice)
            assert steps(twice, size) <= 2.5 * steps(once, size) + LETTERS_READ, kind


def test_eight_thousand_blanks_in_an_argument_are_read():
    for name, text in (
        ("GLM 4.5", "<tool_call>f<arg_key>" + " " * 8000 + "</tool_call>"),
        ("Mistral, names before arguments", "[TOOL_CALLS]" + " " * 8000 + "x"),
        ("FunctionGemma", "<start_function_call>call:f" + " " * 8000 + "x"),
        ("DeepSeek", "<｜tool▁calls▁begin｜>" + " " * 8000 + "x<｜tool▁calls▁end｜>"),
    ):
        assert read(name, [text]) == ("", text, [])


MODULES = ("call_bodies", "calls", "reading")
BOUNDED = {"_HEADER", "_HEADER_START"}
"""Patterns of texts of at most 200 letters."""


def patterns():
    """Yield the patterns of the modules."""
    for module in MODULES:
        values = vars(importlib.import_module(f"backend.openai_frontend.{module}"))
        for name, value in values.items():
            if isinstance(value, re.Pattern) and name not in BOUNDED:
                yield pytest.param(value.pattern, id=f"{module}.{name}")


@pytest.mark.parametrize("pattern", list(patterns()))
def test_what_follows_a_repeat_in_a_pattern_can_be_no_part_of_it(pattern):
    """Such a pattern never goes back over what a repeat has taken but to give up."""
    check(list(parser.parse(pattern)), set())


@pytest.mark.parametrize(
    "pattern",
    [r"\s*(.*?)\s*x", r"\s*(?:a)?\s*b", r"(?:a|[ab]b)*c", r"(?:\s*a?)*b", r"a*a", r"(a+)+b"],
)
def test_the_check_of_patterns_knows_bad_ones(pattern):
    with pytest.raises(AssertionError):
        check(list(parser.parse(pattern)), set())


LETTERS_TRIED = [chr(code) for code in range(128)] + ["é", "｜", "▁"]


def firsts(item, rest):
    """Return the letters that an item of a pattern can begin with; ``rest`` where it may be
    empty.
    """
    code, value = item
    if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
        one = compiler.compile(parser.SubPattern(parser.State(), [item]), re.DOTALL)
        return {letter for letter in LETTERS_TRIED if one.fullmatch(letter)}
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, _, inner = value
        return of_all(list(inner), rest) | (rest if low == 0 else set())
    if code is codes.SUBPATTERN:
        return of_all(list(value[-1]), rest)
    if code is codes.BRANCH:
        return set().union(*(of_all(list(branch), rest) for branch in value[1]))
    return rest  # an assertion takes no letter


def of_all(items, rest):
    for item in reversed(items):
        rest = firsts(item, rest)
    return rest


def check(items, rest):
    """Assert that every choice in a pattern is made by the next letter."""
    for at, (code, value) in enumerate(items):
        follows = of_all(items[at + 1 :], rest)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            _, most, inner = value
            inside = of_all(list(inner), set())
            assert most == 1 or inside.isdisjoint(follows), (items[at], inside & follows)
            check(list(inner), follows | (inside if most > 1 else set()))
        elif code is codes.SUBPATTERN:
            check(list(value[-1]), follows)
        elif code is codes.BRANCH:
            taken = set()
            for branch in map(list, value[1]):
                begins = of_all(branch, follows)
                assert taken.isdisjoint(begins), items[at]
                taken |= begins
                check(branch, follows)
