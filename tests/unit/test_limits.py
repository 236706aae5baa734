from dataclasses import asdict

import pytest

from backend.limits import (
    MOST_GUIDE_CHARACTERS,
    MOST_SALT_CHARACTERS,
    MOST_STOP_WORDS,
    MOST_TEXT_BYTES,
    MOST_WORD_LENGTH,
    MOST_WORDS_LENGTH,
    NO_BOUND,
    UNBOUNDED_TEXT_BYTES,
    Limits,
    TextBound,
    check_sizes,
)
from backend.request import ErrorCode, GenerationRequest, RequestError

LIMITS = Limits(TextBound(10, shrinkage=4), 100)


def refusal(check, *arguments):
    with pytest.raises(RequestError) as raised:
        check(*arguments)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT
    return raised.value.message


def test_a_text_of_more_bytes_than_the_context_can_have_is_refused():
    LIMITS.check(GenerationRequest("a" * 1000, 1))
    assert refusal(LIMITS.check, GenerationRequest("a" * 1001, 1)) == (
        "text_input of 1001 bytes is over the limit of 100 tokens"
    )
    LIMITS.check(GenerationRequest("\u00e9" * 2000, 1))
    assert "4002 bytes" in refusal(LIMITS.check, GenerationRequest("\u00e9" * 2001, 1))


def test_a_lone_surrogate_does_not_hide_the_size():
    assert "6003 bytes" in refusal(LIMITS.check_text, "QUERY", "\ud83d" * 2001)


def test_white_space_counts_only_where_no_token_swallows_it():
    text = "a" * 1000 + " \t\n\u3000" * 500
    assert not TextBound(10).fits(text, 100)
    assert TextBound(10, skips_white_space=True).fits(text, 100)
    assert not TextBound(10, skips_white_space=True).fits(text + "a", 100)


def test_bytes_that_the_tokenizer_leaves_out_do_not_count():
    text = "a" * 1000 + "\x04\U00040000" * 500
    bound = TextBound(10, dropped=b"\x04\xf1")
    assert not TextBound(10).fits(text, 250)
    assert bound.fits(text, 250)
    assert not bound.fits(text + "a", 250)


def test_without_a_bound_any_text_may_fit_but_one_over_the_fixed_limit():
    limits = Limits(NO_BOUND, 100)
    limits.check_text("QUERY", "a" * UNBOUNDED_TEXT_BYTES)
    message = refusal(limits.check_text, "QUERY", "a" * (UNBOUNDED_TEXT_BYTES + 1))
    assert message == f"QUERY of 1048577 bytes is over the limit of {UNBOUNDED_TEXT_BYTES} bytes"
    Limits(NO_BOUND, 20_000).check_text("QUERY", "a" * (UNBOUNDED_TEXT_BYTES + 1))


def test_no_text_may_be_longer_than_the_socket_takes():
    limits = Limits(TextBound(10), 10**9)
    limits.check_text("QUERY", "a" * MOST_TEXT_BYTES)
    assert "bytes" in refusal(limits.check_text, "QUERY", "a" * (MOST_TEXT_BYTES + 1))


def test_each_kind_of_byte_is_counted_by_itself():
    bound = TextBound(10, (10, 6, 1, 4, 5))
    fits = {" ": 1000, "\u00e9": 300, "1": 100, "a": 400, "-": 500}
    for character, most in fits.items():
        assert bound.fits(character * most, 100)
        assert not bound.fits(character * (most + 1), 100)
    assert bound.fits("".join(character * (most // 5) for character, most in fits.items()), 100)


@pytest.mark.parametrize("name", ["input_ids", "prompt_token_ids"])
def test_more_token_ids_than_the_context_holds_are_refused(name):
    LIMITS.check(GenerationRequest("", 1, **{name: (5,) * 100}))
    message = refusal(LIMITS.check, GenerationRequest("", 1, **{name: (5,) * 101}))
    assert message == f"{name} of 101 tokens is over the limit of 100"


def test_a_hello_carries_the_limits():
    info = {"text_bound": asdict(LIMITS.bound), "max_context_tokens": 101}
    assert Limits.from_info(info) == LIMITS
    Limits.from_info({}).check(GenerationRequest("a" * 10_000, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_words", ("a",) * (MOST_STOP_WORDS + 1)),
        ("stop_words", ("a" * (MOST_WORD_LENGTH + 1),)),
        ("bad_words", ("a" * MOST_WORD_LENGTH,) * (MOST_WORDS_LENGTH // MOST_WORD_LENGTH + 1)),
        ("embedding_bias_words", ("a" * (MOST_WORD_LENGTH + 1),)),
        ("cache_salt", "a" * (MOST_SALT_CHARACTERS + 1)),
        ("guide", "a" * (MOST_GUIDE_CHARACTERS + 1)),
        ("stop_word_ids", ((1,),) * (MOST_STOP_WORDS + 1)),
        ("bad_word_ids", ((1,) * (MOST_WORD_LENGTH + 1),)),
    ],
)
def test_an_option_over_its_size_is_refused_by_name(name, value):
    names = {
        "guide": "guided_decoding_guide",
        "stop_word_ids": "stop_words_list",
        "bad_word_ids": "bad_words_list",
    }
    message = refusal(check_sizes, GenerationRequest("a", 1, **{name: value}))
    assert message.startswith(names.get(name, name))


def test_options_at_their_limits_are_taken():
    words = ("a" * MOST_WORD_LENGTH,) * (MOST_WORDS_LENGTH // MOST_WORD_LENGTH)
    check_sizes(
        GenerationRequest(
            "a",
            1,
            stop_words=("a" * MOST_WORD_LENGTH,) * 64 + ("",) * (MOST_STOP_WORDS - 64),
            bad_words=words,
            cache_salt="a" * MOST_SALT_CHARACTERS,
            guide="a" * MOST_GUIDE_CHARACTERS,
        )
    )
