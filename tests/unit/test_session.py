import pytest

from backend.core.session import Session
from backend.request import (
    ErrorCode,
    FinishReason,
    GenerationRequest,
    RequestError,
    SamplingParams,
)
from backend.sequence import Sequence

EOS = 0


class LetterDecoder:
    """Token id -> character; ids from 200 on are held back until finish, as half a UTF-8 character
    would be.
    """

    def __init__(self):
        self.pending = ""

    def push(self, token_id):
        if token_id >= 200:
            self.pending += "?"
            return ""
        text, self.pending = self.pending + chr(token_id), ""
        return text

    def finish(self):
        text, self.pending = self.pending, ""
        return text


def session(max_tokens=100, stop_words=(), stream=True, sampling=None, **options):
    request = GenerationRequest(
        "prompt", max_tokens, stream=stream, stop_words=tuple(stop_words), **options
    )
    return Session(
        Sequence(1, [7, 8], 2, sampling or SamplingParams()),
        request,
        frozenset({EOS}),
        LetterDecoder(),
        sink=None,
    )


def run(made, blocks):
    """Commit blocks of tokens as steps would; return the streamed text."""
    text = ""
    for block in blocks:
        made.commit(block)
        text += made.pop_delta().text
        if made.finish_reason:
            break
    return text


def ids(text):
    return [ord(letter) for letter in text]


def test_the_earliest_of_several_stop_words_cuts():
    made = session(stop_words=["xyz", "y"])
    assert run(made, [ids("axyz")]) == "ax"


def test_what_may_become_a_stop_word_is_held_back_and_released_when_it_does_not():
    made = session(stop_words=["###"])
    made.commit(ids("a##"))
    assert made.pop_delta().text == "a"
    made.commit(ids("b"))
    assert made.pop_delta().text == "##b"


def test_a_reply_that_is_not_streamed_repeats_the_prompt_unless_excluded():
    whole, bare = (
        session(max_tokens=2, stream=False),
        session(max_tokens=2, stream=False, exclude_input_in_output=True),
    )
    for made in (whole, bare):
        made.commit(ids("ab"))
    assert (whole.pop_delta().text, bare.pop_delta().text) == ("promptab", "ab")


def test_a_stop_word_in_the_prompt_is_not_a_stop():
    made = session(max_tokens=3, stream=False, stop_words=["rom", "tab"])
    made.commit(ids("abc"))
    assert (made.pop_delta().text, made.finish_reason) == ("promptabc", FinishReason.LENGTH)


@pytest.mark.parametrize(("temperature", "seed"), [(0.8, 2**64 - 1), (0.0, None)])
def test_the_usage_names_the_seed_of_a_sampled_text(temperature, seed):
    sequence = Sequence(1, [7, 8], 2, SamplingParams(temperature, seed=2**64 - 1))
    request = GenerationRequest("prompt", 4)
    made = Session(sequence, request, frozenset({EOS}), LetterDecoder(), sink=None)
    assert made.usage().seed == seed


def test_a_token_that_everything_bans_is_reported_as_openai_does():
    made = session(3, sampling=SamplingParams(log_probs=True))
    made.commit(ids("ab"), [-0.5, -2e30])
    delta = made.pop_delta()
    assert (delta.log_probs, delta.cum_log_prob) == ([-0.5, -9999.0], -9999.5)


class Failing:
    """A grammar that its parser has given up."""

    failure = "it is too large"


@pytest.mark.parametrize(
    ("tokens", "ended"),
    [(ids("ab"), None), ([*ids("ab"), EOS], None), (ids("abc"), FinishReason.LENGTH)],
)
def test_a_grammar_that_cannot_be_followed_is_the_request_s_fault(tokens, ended):
    made = session(3)
    made.sequence.sampling = SamplingParams(guide=Failing())
    if ended is not None:  # a text that is complete needs no more of its grammar
        made.commit(tokens)
        assert made.finish_reason == ended
        return
    with pytest.raises(RequestError, match="guided_decoding_guide cannot be followed") as raised:
        made.commit(tokens)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("text", "stop_words"),
    [("ab##c", ["###"]), ("abST", ["STOP"]), ("a\xd8\xd9b", ["zz"]), ("abcSTOPq", ["STOP", "cS"])],
)
def test_a_resumed_text_goes_on_where_an_unbroken_stream_would(text, stop_words):
    tokens, sent = ids(text), [""]
    whole = session(stop_words=stop_words)
    for token in tokens:
        if whole.finish_reason is None:
            whole.commit([token])
            sent.append(sent[-1] + whole.pop_delta().text)
    for cut in range(1, len(sent) - 1):
        request = GenerationRequest("", 99, stream=True, stop_words=tuple(stop_words))
        sequence = Sequence(1, [7, 8, *tokens[:cut]], 2, SamplingParams())
        made = Session(sequence, request, frozenset({EOS}), LetterDecoder(), sink=None)
        assert sent[cut] + run(made, [[token] for token in tokens[cut:]]) == sent[-1]
        assert made.finish_reason == whole.finish_reason


def test_a_stop_word_of_token_ids_may_begin_before_the_cut():
    request = GenerationRequest("", 99, stream=True, stop_word_ids=((5, 6),), input_ids=(7, 5))
    made = Session(
        Sequence(1, [7, 5], 1, SamplingParams()), request, frozenset(), LetterDecoder(), sink=None
    )
    assert made.commit([6, 9]) == 1
    assert made.finish_reason is FinishReason.STOP_WORDS
