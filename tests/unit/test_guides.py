"""Grammars as masks over a tokenizer's tokens."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from backend.request import ErrorCode, RequestError
from backend.sampling import guides, reading
from backend.sampling.guides import KNOWN_GRAMMARS, Grammars
from backend.sampling.reading import TryAgainError, convert
from backend.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
END = 256
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
)
GUIDES = {
    "json": ("", '[1, {"a": null}]'),
    "json_schema": (SCHEMA, '{"n": 12}'),
    "regex": ("(ab|cd)+x", "abcdx"),
    "ebnf_grammar": ('root ::= "a" root "b" | "-"', "aa-bb"),
}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(BYTES)


def made(grammars, kind="regex", end_ids=BYTES.end_ids):
    return grammars.guide(kind, GUIDES[kind][0], end_ids)


def letters(mask):
    return "".join(chr(token) for token in mask.nonzero()[0] if token < 128)


@pytest.mark.parametrize("kind", GUIDES)
def test_a_text_of_the_grammar_is_allowed_token_by_token_and_then_may_end(grammars, kind):
    guide, text = made(grammars, kind), list(GUIDES[kind][1].encode())
    masks = [guide.mask(text[:at]) for at in range(len(text) + 1)]
    assert all(mask[token] for mask, token in zip(masks, text, strict=False))
    assert masks[-1][END]
    assert not masks[0][END]


def test_an_end_that_only_the_model_s_padded_vocabulary_has_is_none_of_the_grammar(grammars):
    guide = made(grammars, end_ids=BYTES.end_ids | {BYTES.vocab_size + 40})
    assert guide.mask(list(b"abcdx")).nonzero()[0].tolist() == [END]
    with pytest.raises(RequestError, match="nothing could end the text"):
        made(grammars, end_ids=frozenset({BYTES.vocab_size + 40}))


def test_after_a_token_that_is_not_allowed_there_is_no_mask(grammars):
    guide = made(grammars)
    assert letters(guide.mask(list(b"ab"))) == "acx"
    assert letters(guide.mask(list(b"abc"))) == "d"
    assert guide.mask(list(b"abca")) is None
    assert guide.count_allowed(list(b"ab"), list(b"cax")) == 1
    assert guide.mask(list(b"b")) is None


def test_a_guide_can_be_asked_about_any_place_in_any_order(grammars):
    guide, text = made(grammars), list(b"ab" * 100 + b"cd")
    for end in (202, 3, 150, 0, 202, 101):
        assert letters(guide.mask(text[:end])) == ("b" if end % 2 else "acx" if end else "ac")


def test_a_request_s_own_end_ids_end_the_text_and_an_end_is_no_token_of_the_grammar(grammars):
    guide = made(grammars, end_ids=frozenset({ord("x"), 7}))
    assert letters(guide.mask(list(b"ab"))) == "acx"
    assert guide.mask(list(b"abx")) is None
    mask = made(grammars, end_ids=frozenset({7})).mask(list(b"abx"))
    assert mask.nonzero()[0].tolist() == [7]


def test_an_end_counts_among_the_allowed_proposals_where_the_text_may_end(grammars):
    guide = made(grammars)
    assert guide.count_allowed(list(b"ab"), [ord("x"), END, ord("a")]) == 2
    assert guide.count_allowed(list(b"ab"), [END]) == 0


def test_a_guide_made_in_one_thread_serves_another(grammars):
    with ThreadPoolExecutor(1) as pool:
        guide = pool.submit(made, grammars).result()
    assert letters(guide.mask([])) == "ac"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[ab"),
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", '{"type": "nope"}'),
        ("json_schema", '{"$ref": "http://example.org/x"}'),
        ("json_schema", '{"$ref": "#"}'),
        ("ebnf_grammar", "root ::= nowhere"),
        ("ebnf_grammar", "("),
    ],
)
def test_a_grammar_that_cannot_be_served_is_an_error_that_names_it(grammars, kind, text):
    with pytest.raises(RequestError, match="guided_decoding_guide") as raised:
        grammars.guide(kind, text, BYTES.end_ids)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT
    assert len(str(raised.value)) < 400
    assert not re.search(r"/\w+/", str(raised.value).replace(text, ""))


def test_a_text_that_nothing_could_end_is_refused(grammars):
    with pytest.raises(RequestError, match="end_id must not be -1"):
        grammars.guide("regex", "a+", frozenset())


def test_the_first_mask_is_made_with_the_guide_and_not_by_the_loop(grammars):
    assert list(made(grammars)._masks) == [0]


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        ("regex", "(a{1,1000}){1,1000}", "a" * 200),  # found by a mask
        ("ebnf_grammar", 'root ::= "a" b\nb ::= "c" b', "acc"),  # found by taking a token
    ],
)
def test_a_grammar_beyond_the_parsers_limits_allows_nothing_but_an_end_and_says_so(
    grammars, kind, text, output
):
    guide, tokens = grammars.guide(kind, text, BYTES.end_ids), list(output.encode())
    masks = [guide.mask(tokens[:at]) for at in range(len(tokens) + 1)]
    assert masks[0][ord("a")]
    assert masks[-1].nonzero()[0].tolist() == [END]
    assert guide.failure.startswith("it is too large: ")
    assert guide.count_allowed(tokens, tokens) == 0
    assert grammars.guide(kind, text, BYTES.end_ids).failure is None


def test_a_matcher_that_is_rolled_back_from_its_limits_never_lets_a_text_leave_the_grammar(
    grammars,
):
    strings = {"type": "string", "pattern": "^(a{1,1000}){200,1000}$"}
    schema = {"type": "object", "properties": {"a": strings}, "required": ["a"]}
    guide = grammars.guide("json_schema", json.dumps(schema), BYTES.end_ids)
    text = list(b'{"a":"')
    assert letters(guide.mask(text)) == "a"  # as a draft looks ahead
    for at in range(len(text) + 1):
        assert guide.mask(text[:at]) is not None
    assert guide.failure


@pytest.mark.parametrize(
    ("kind", "text"), [("json_schema", '{"$ref": "#"}'), ("regex", "a[^\\s\\S]")]
)
def test_a_grammar_without_a_text_is_refused_in_plain_words(grammars, kind, text):
    with pytest.raises(RequestError, match=r"can be served: it allows no text$"):
        grammars.guide(kind, text, BYTES.end_ids)


class Counting:
    """Reads grammars and keeps count."""

    def __init__(self):
        self.texts = []

    def __call__(self, kind, text):
        self.texts.append(text)
        return convert(kind, text)


@pytest.mark.parametrize("copied_from_s", [0.0, 60.0])
def test_a_grammar_is_read_once_for_all_its_requests(monkeypatch, copied_from_s):
    """One that takes long to compile is compiled once, too, as for ``n`` texts of one body."""
    monkeypatch.setattr(guides, "COPIED_FROM_S", copied_from_s)
    compiled, limits = [], reading.limits
    monkeypatch.setattr(reading, "limits", lambda kind: compiled.append(kind) or limits(kind))
    count = Counting()
    grammars = Grammars(BYTES, read=count)
    assert not grammars.knows("regex", "[ab]+")
    first, *others = (grammars.guide("regex", "[ab]+", BYTES.end_ids) for _ in range(128))
    assert grammars.knows("regex", "[ab]+")
    assert (count.texts, len(compiled)) == (["[ab]+"], 128 if copied_from_s else 1)
    assert first.mask(list(b"ab")) is not None
    assert first.mask(list(b"abc")) is None
    assert all(letters(guide.mask([])) == "ab" for guide in others)
    ended = grammars.guide("regex", "[ab]+", frozenset({7}))
    assert ended.mask(list(b"a"))[7]
    assert not others[0].mask(list(b"a"))[7]


def test_tenants_share_no_grammar():
    count = Counting()
    grammars = Grammars(BYTES, read=count)
    for salt in ("", "a", "b", "a"):
        grammars.guide("regex", "x", BYTES.end_ids, salt)
    assert count.texts == ["x"] * 3
    assert not grammars.knows("regex", "x", "c")


def test_a_request_that_reaches_the_limits_leaves_later_ones_theirs(monkeypatch):
    monkeypatch.setattr(guides, "COPIED_FROM_S", 0.0)
    grammars = Grammars(BYTES)
    for _ in range(3):
        guide = grammars.guide("regex", "(a{1,1000}){1,1000}", BYTES.end_ids)
        assert guide.mask(list(b"a" * 50))[ord("a")]
        assert guide.mask(list(b"a" * 200)).nonzero()[0].tolist() == [END]
        assert guide.failure


def test_what_cannot_be_served_is_read_once_too():
    count = Counting()
    grammars = Grammars(BYTES, read=count)
    for _ in range(3):
        with pytest.raises(RequestError, match=r"guided_decoding_guide is no regex that can"):
            grammars.guide("regex", "[ab", BYTES.end_ids)
    assert count.texts == ["[ab"]


def test_few_grammars_are_kept_the_last_ones():
    count = Counting()
    grammars = Grammars(BYTES, read=count)
    grammars.guide("regex", "x", BYTES.end_ids)
    for number in range(KNOWN_GRAMMARS):
        grammars.guide("regex", f"{number}", BYTES.end_ids)
        grammars.guide("regex", "x", BYTES.end_ids)
    assert count.texts == ["x", *map(str, range(KNOWN_GRAMMARS))]
    assert grammars.knows("regex", "x")
    assert not grammars.knows("regex", "0")


def test_a_failure_that_is_not_the_grammar_s_is_none_for_the_next_request():
    def read(kind, text, failures=[1]):  # noqa: B006
        if failures:
            failures.pop()
            raise TryAgainError("try again later")
        return convert(kind, text)

    grammars = Grammars(BYTES, read=read)
    with pytest.raises(RequestError, match="try again later") as raised:
        grammars.guide("regex", "a", BYTES.end_ids)
    assert raised.value.code == ErrorCode.UNAVAILABLE
    assert letters(grammars.guide("regex", "a", BYTES.end_ids).mask([])) == "a"


WORDS = [bytes(word) for word in product(range(ord("a"), ord("z") + 1), repeat=3)]
MANY = ByteTokenizer(
    vocab_size=BYTES.vocab_size + len(WORDS), token_bytes=(*BYTES.token_bytes, *WORDS)
)
"""Words as tokens, as a model has them: a mask looks at each."""
AMBIGUOUS = (
    "root ::= s\ns ::= s s | [a-z ]",
    'root ::= s\ns ::= s s s | s s | [a-z ] | ""',
    'root ::= s\ns ::= s s s s | t t | ""\nt ::= s [a-z ] s | s "." s',
)


@pytest.mark.medium
@pytest.mark.parametrize("text", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_before_its_masks_take_long(text):
    """It ends by a number of the parser's items, so that a text is always the same."""
    guide = Grammars(MANY).guide("ebnf_grammar", text, MANY.end_ids)
    word = MANY.token_bytes.index(b"aaa")
    length = next(n for n in range(120) if guide.mask([word] * n)[END] and guide.failure)
    assert "Current row has" in guide.failure
    again = Grammars(MANY).guide("ebnf_grammar", text, MANY.end_ids)
    assert again.mask([word] * (length - 1))[word]
    assert again.failure is None
