"""The tokens of completions: where they are in a text, and what they are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.openai_frontend.choices import (
    COMPLETION,
    Style,
    TextChoice,
    TextOffsets,
    by_text,
    token_text,
)
from backend.openai_frontend.triton import Piece, Token

SPECIAL = frozenset({b"<s>", b"<|end|>"})


def cut(text, *sizes):
    """Return the UTF-8 of a text as tokens of these bytes, the rest as one more."""
    data, tokens = text.encode(), []
    for size in sizes:
        tokens.append(data[:size])
        data = data[size:]
    return [*tokens, data] if data else tokens


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        (cut("🙂🚀", 1, 2, 1, 2, 2), [0, 0, 0, 1, 1]),
        (cut("日本x", 1, 1, 1, 2, 1, 1), [0, 0, 0, 1, 1, 2]),
        (cut("é!é", 1, 1, 1, 1), [0, 0, 1, 2, 2]),
        (cut("a 🙂b", 3, 3, 1), [0, 2, 3]),  # " \xf0": the token begins with the blank
        (cut("🙂🚀x", 5, 4), [0, 1]),  # a token that ends one and begins the next
        ([b"\xf0\x9f", b"x", b"\x80", b"\x80y"], [0, 1, 2, 3]),  # no UTF-8: each piece is one
        ([b"\xf0\x9f", b"\xe6", b"\x97", b"\xa5"], [0, 1, 1, 1]),
        ([b"\xe0", b"\x80", b"a"], [0, 1, 2]),
        ([b"a", b"<|end|>", b"b"], [0, 1, 1]),
        ([b"\xf0\x9f", b"<|end|>", b"\x99\x82"], [0, 0, 0]),
    ],
)
def test_an_offset_is_that_of_the_character_that_a_token_begins_in(tokens, offsets):
    assert TextOffsets("", SPECIAL).of_output(tokens) == offsets
    places = TextOffsets("", SPECIAL)
    assert [places.of_output([token])[0] for token in tokens] == offsets


@given(st.text(), st.data())
def test_offsets_are_those_of_the_characters_however_a_text_is_cut(text, data):
    whole, tokens = text.encode("utf-8", "replace"), []
    text = whole.decode()
    while rest := whole[sum(map(len, tokens)) :]:
        tokens.append(rest[: data.draw(st.integers(1, 4))])
    of_byte = [n for n, letter in enumerate(text) for _ in letter.encode()]
    first = [sum(map(len, tokens[:n])) for n in range(len(tokens))]
    expected = [of_byte[at] for at in first]
    assert TextOffsets("", SPECIAL).of_output(tokens) == expected
    places = TextOffsets(text, SPECIAL)
    assert places.of_prompt(tokens) == expected
    assert places.of_output([b"a", b"b"]) == [len(text), len(text) + 1]


@pytest.mark.parametrize(
    ("echoed", "tokens", "offsets"),
    [
        ("<s>user hé", [b"<s>", b"user", b" h", b"\xc3", b"\xa9"], [0, 3, 7, 9, 9]),
        ("hi", [b"<s>", b"hi"], [0, 0]),  # the tokenizer's own
        ("hi", [b"<s>", b" hi"], [0, 0]),  # and a blank of its own
        ("hi you", [b" hi", b" you"], [0, 2]),
        ("a<s>b", [b"a", b"<s>", b"b"], [0, 1, 4]),
        ("ab", [b"a", b"<s>", b"b"], [0, 1, 1]),  # of a prompt of ids, which is shown without
        ("�", [b"\xf0\x9f"], [0]),
    ],
)
def test_a_prompt_is_followed_as_it_is_echoed(echoed, tokens, offsets):
    places = TextOffsets(echoed, SPECIAL)
    assert places.of_prompt(tokens) == offsets
    assert places.of_output([b"\x99", b"x"]) == [len(echoed), len(echoed) + 1]


def test_a_part_of_a_character_is_called_by_its_bytes():
    names = {b"a\xc3": r"bytes:a\xc3", b"\xf0\x9f": r"bytes:\xf0\x9f", b"\\\x80": r"bytes:\x5c\x80"}
    assert {data: token_text(data) for data in names} == names
    assert [token_text(data) for data in (b"a", "é".encode(), b"\n", b"")] == ["a", "é", "\n", ""]


def test_no_two_alternatives_have_one_name():
    parts = [(bytes([value]), -0.1 * n) for n, value in enumerate(range(0x80, 0xA0))]
    assert list(by_text(parts).values()) == [value for _, value in parts]
    twice = by_text([(b"A", -1.0), (b"A", -2.0), (b"<s>", -3.0)])
    assert twice == {"A": -1.0, "bytes:A": -2.0, "<s>": -3.0}


def token(data, *top):
    return Token(data, -0.5, [(other, -1.0 - n) for n, other in enumerate((data, *top))])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_completion_lists_the_tokens_of_its_text_with_their_places(streamed):
    style = Style(COMPLETION, log_probs=True, special=SPECIAL)
    pieces = [
        Piece(0, 0, "", tokens=[token(b"\xf0\x9f", b"\xf0")]),
        Piece(0, 0, "🙂", tokens=[token(b"\x99\x82", b"\x99")]),
        Piece(0, 0, "a", "end_id", tokens=[token(b"<s>"), token(b"a", b"<|end|>"), token(b"x")]),
    ]
    choice, made = TextChoice(style, 0), []
    for piece in pieces:
        choice.add(piece)
        made += [choice.part()] if streamed else []
    made = made or [choice.whole()]
    joined = {
        name: [item for part in made for item in part["logprobs"][name]]
        for name in ("tokens", "text_offset", "top_logprobs")
    }
    assert "".join(part["text"] for part in made) == "🙂a"
    assert joined["tokens"] == [r"bytes:\xf0\x9f", r"bytes:\x99\x82", "a"]
    assert joined["text_offset"] == [0, 0, 1]
    assert joined["top_logprobs"][0] == {r"bytes:\xf0\x9f": -1.0, r"bytes:\xf0": -2.0}
    assert joined["top_logprobs"][2] == {"a": -1.0, "<|end|>": -2.0}


def test_an_echoed_completion_lists_all_tokens():
    style = Style(COMPLETION, log_probs=True, echo=True, special=SPECIAL)
    choice = TextChoice(style, 0, "hé")
    prompt = [Token(b"<s>", None, []), token(b"h"), token(b"\xc3"), token(b"\xa9")]
    end = [token(b"a"), token(b"<|end|>")]
    choice.add(Piece(0, 0, "a", "end_id", tokens=end, prompt_tokens=prompt))
    log_probs = choice.whole()["logprobs"]
    assert log_probs["tokens"] == ["<s>", "h", r"bytes:\xc3", r"bytes:\xa9", "a", "<|end|>"]
    assert log_probs["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert (log_probs["token_logprobs"][0], log_probs["top_logprobs"][0]) == (None, None)
