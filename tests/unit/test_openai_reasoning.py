"""Reasoning read apart from the answer, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.openai_frontend.reading import (
    FORMATS,
    Reasoning,
    ReasoningReader,
    reasoning_after,
    reasoning_format,
)

THINK, SEED = FORMATS
OPEN, MAY_OPEN = Reasoning(THINK, True), Reasoning(THINK, False)
TEXTS = [
    (MAY_OPEN, "<think>\na b\n</think>\n\nYes.", "a b", "Yes."),
    (MAY_OPEN, "\n<think>a</think>Yes. ", "a", "Yes. "),
    (MAY_OPEN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (MAY_OPEN, " Yes.", "", " Yes."),
    (MAY_OPEN, "<thin>k", "", "<thin>k"),
    (MAY_OPEN, "<thi", "", "<thi"),
    (MAY_OPEN, "", "", ""),
    (MAY_OPEN, "It is <think>b</think>", "", "It is <think>b</think>"),
    (MAY_OPEN, "<think>a </thin k> </think> b </think> c", "a </thin k>", "b </think> c"),
    (MAY_OPEN, "<think>a <think> b</think>c", "a <think> b", "c"),
    (MAY_OPEN, "<think> a and </thi", "a and </thi", ""),
    (MAY_OPEN, "<think>a</think>\n ", "a", ""),
    (OPEN, "\na\n\nb\n</think>\n\nYes.", "a\n\nb", "Yes."),
    (OPEN, "<think>a</think>Yes.", "a", "Yes."),
    (OPEN, "a < b \n", "a < b", ""),
    (OPEN, "</think>Yes.", "", "Yes."),
    (OPEN, "  ", "", ""),
    (Reasoning(SEED, True), "a</think></seed:think>b", "a</think>", "b"),
]


def read(reasoning, pieces):
    reader = ReasoningReader(reasoning)
    return [reader.read(piece, ended=False) for piece in pieces] + [reader.read("", ended=True)]


@pytest.mark.parametrize(("reasoning", "text", "inside", "answer"), TEXTS)
def test_a_text_has_its_reasoning(reasoning, text, inside, answer):
    for pieces in ([text], text):
        found = read(reasoning, pieces)
        assert ["".join(column) for column in zip(*found, strict=True)] == [inside, answer]


PARTS = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "a", " ", "\n", "<", "é"])


@given(st.lists(PARTS, max_size=12), st.booleans(), st.data())
def test_nothing_but_marks_and_blanks_is_lost(parts, is_open, data):
    text = "".join(parts)
    whole = read(Reasoning(THINK, is_open), [text])
    reasoning, answer = ("".join(column) for column in zip(*whole, strict=True))
    first, last = "".join(reasoning.split()), "".join(answer.split())
    marked = (first, f"<think>{first}", f"{first}</think>", f"<think>{first}</think>")
    assert "".join(text.split()) in [begun + last for begun in marked]
    cut = data.draw(st.integers(0, len(text)))
    cut_twice = read(Reasoning(THINK, is_open), [text[:cut], "", text[cut:]])
    assert tuple("".join(column) for column in zip(*cut_twice, strict=True)) == (reasoning, answer)


def test_reasoning_and_answer_come_as_they_are_written():
    words = ["<think>", "one", " two", "</think>", "\n\n", "three", " four"]
    assert read(MAY_OPEN, words) == [
        ("", ""),
        ("one", ""),
        (" two", ""),
        ("", ""),
        ("", ""),
        ("", "three"),
        ("", " four"),
        ("", ""),
    ]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ content.split('</think>')[-1] }}", THINK),
        ("{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}", THINK),
        ("<seed:think>{{ reasoning }}</seed:think>", SEED),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_marks_are_known_by_the_template(template, form):
    assert reasoning_format(template) == form


@pytest.mark.parametrize(
    ("form", "prompt", "reasoning"),
    [
        (THINK, "hi<assistant>", MAY_OPEN),
        (THINK, "hi<assistant><think>\n", OPEN),
        (THINK, "hi<assistant><think>\n\n</think>\n\n", None),
        (THINK, "hi<assistant></think>", None),
        (None, "hi<assistant><think>", None),
    ],
)
def test_the_prompt_says_where_the_text_begins(form, prompt, reasoning):
    assert reasoning_after(form, prompt) == reasoning
