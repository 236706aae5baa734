"""However a text is cut into runs, its replies are those of one token at a time; and those are what
the whole text's bytes say.
"""

import codecs
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.core.session import Session
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Sequence
from backend.tokenizer import ByteTokenizer, IncrementalDecoder

TOKENIZER = ByteTokenizer()
END_ID = 256
PROMPT = "é👋"
LETTERS = "aé€😀"  # one to four bytes, which share some
SPECIAL_TOKENS = {"<x>": 257, "<x>y": 258, "<end>": END_ID}
END_MARK = "\ue000"
MARKS = {"<x>y": "\ue002", "<x>": "\ue001", "<end>": END_MARK}  # the longest name first


def run(blocks, stop_words, max_tokens, *, stream):
    """Commit blocks as steps would; return (text, reason, tokens taken, log-probabilities, their
    sum) of all replies together.
    """
    request = GenerationRequest(PROMPT, max_tokens, stream=stream, stop_words=tuple(stop_words))
    prompt = TOKENIZER.encode(PROMPT)
    sequence = Sequence(1, list(prompt), len(prompt), SamplingParams(log_probs=True))
    session = Session(
        sequence,
        request,
        frozenset({END_ID}),
        IncrementalDecoder(TOKENIZER.token_bytes),
        None,
        SPECIAL_TOKENS,
    )
    text, log_probs, total = "", [], 0.0
    for block in blocks:
        start = session.output_tokens
        taken = session.commit(block, [-0.5 - (start + i) for i in range(len(block))])
        assert (session.output_tokens, session.remaining) == (
            start + taken,
            max_tokens - start - taken,
        )
        assert sequence.tokens[len(prompt) + start :] == block[:taken]
        if stream or session.finish_reason:
            delta = session.pop_delta()
            if delta.text or session.finish_reason:
                text, total = text + delta.text, delta.cum_log_prob
                log_probs += delta.log_probs
        if session.finish_reason:
            return (
                text if stream else text.removeprefix(PROMPT),
                session.finish_reason.value,
                session.output_tokens,
                log_probs,
                total,
            )
    return text, None, session.output_tokens, log_probs, total


def mark_of(token):
    return next(MARKS[name] for name, special in SPECIAL_TOKENS.items() if special == token)


def with_marks(word):
    for name, mark in MARKS.items():
        word = word.replace(name, mark)
    return word


def without_marks(text):
    return "".join(letter for letter in text if letter not in MARKS.values())


def expected(tokens, stop_words, max_tokens):
    """Return (text, reason, tokens) by looking at the whole text after every token."""
    words = [word for word in map(with_marks, stop_words) if word not in (*stop_words, END_MARK)]
    named = [mark for name, mark in MARKS.items() if any(name in word for word in stop_words)]
    for count in range(1, len(tokens) + 1):
        reason = (
            "end_id" if tokens[count - 1] == END_ID else "length" if count == max_tokens else None
        )
        decoder, marked = codecs.getincrementaldecoder("utf-8")("replace"), ""
        for token in tokens[:count]:
            if token < END_ID:
                marked += decoder.decode(bytes([token]))
                continue
            if token == END_ID:
                marked += decoder.decode(b"", final=True)
            if mark_of(token) in named:
                marked += mark_of(token)
        marked += decoder.decode(b"", final=reason is not None)
        text = without_marks(marked)
        found = [text.index(word) for word in stop_words if word in text]
        places = [marked.index(word) for word in words if word in marked]
        found += [len(without_marks(marked[:place])) for place in places]
        if found:
            return text[: min(found)], "stop_words", count
        if reason:
            return text, reason, count
    return text, None, len(tokens)


texts = st.lists(
    st.sampled_from(
        [
            *(letter.encode() for letter in LETTERS),
            b"\xf0",
            b"\x80",
            b"\xe2\x82",
            bytes([0]),
            (257,),
            (258,),
        ]
    ),
    max_size=12,
)
tokens = texts.map(lambda parts: [token for part in parts for token in part]).flatmap(
    lambda data: st.integers(0, 3 * len(data)).map(
        lambda end: [*data[:end], END_ID, *data[end:]] if end < len(data) else data
    )
)


@pytest.mark.medium
@settings(max_examples=500)
@given(
    tokens=tokens.filter(bool),
    cuts=st.lists(st.integers(1, 48), max_size=12),
    stop_words=st.lists(
        st.lists(st.sampled_from([*LETTERS, "\ufffd", *SPECIAL_TOKENS]), max_size=3).map("".join),
        max_size=3,
    ),
    max_tokens=st.integers(1, 48),
)
@example(tokens=list("a€".encode()), cuts=[2], stop_words=["€"], max_tokens=9)
@example(tokens=[*"a€".encode()[:3], END_ID], cuts=[], stop_words=["\ufffd"], max_tokens=9)
@example(tokens=[*b"ab", 257, *b"c"], cuts=[1], stop_words=["b<x>c"], max_tokens=9)
@example(tokens=[*b"ab", 257, *b"c"], cuts=[1], stop_words=["<x>", "bc"], max_tokens=9)
@example(tokens=[257, *b"<x>", 258], cuts=[1], stop_words=["<x>"], max_tokens=9)
@example(tokens=[*b"ab", END_ID], cuts=[2], stop_words=["b<end>"], max_tokens=9)
@example(tokens=[*b"ab", END_ID], cuts=[2], stop_words=["<end>"], max_tokens=9)
@example(tokens=[258, 195, END_ID], cuts=[], stop_words=["<x>y\ufffd"], max_tokens=9)
@example(tokens=[*b"b", 195, END_ID], cuts=[], stop_words=["b\ufffd<end>"], max_tokens=9)
@example(tokens=[257, 258, *b"a"], cuts=[], stop_words=["<x>a"], max_tokens=9)
@example(tokens=list("é😀é".encode()), cuts=[1, 4], stop_words=["é😀é"], max_tokens=8)
@pytest.mark.parametrize("stream", [True, False])
def test_any_cut_into_runs_gives_the_replies_of_one_token_at_a_time(
    tokens, cuts, stop_words, max_tokens, stream
):
    borders = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    blocks = [tokens[a:b] for a, b in pairwise(borders)]
    text, reason, taken, log_probs, total = run(blocks, stop_words, max_tokens, stream=stream)
    one_by_one = run([[token] for token in tokens], stop_words, max_tokens, stream=stream)
    assert (text, reason, taken) == one_by_one[:3]
    words = [word for word in stop_words if word]
    full, *end = expected(tokens, words, max_tokens)
    assert [reason, taken] == end
    if reason:
        assert text == full
        assert log_probs == one_by_one[3] == [-0.5 - i for i in range(taken)]
        assert total == one_by_one[4] == sum(log_probs)
    elif stream:  # what is held back is nothing but the beginning of a stop word
        assert full.startswith(text)
        withheld = full[len(text) :]
        words += [without_marks(with_marks(word)) for word in words]
        assert not withheld or any(word.startswith(withheld) for word in words)
