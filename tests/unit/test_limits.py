import pytest

from backend.limits import (
    LEAST_TEXT_BYTES,
    MOST_GUIDE_CHARACTERS,
    MOST_SALT_CHARACTERS,
    MOST_STOP_WORDS,
    MOST_TEXT_BYTES,
    MOST_WORD_LENGTH,
    MOST_WORDS_LENGTH,
    PromptLimits,
    check_sizes,
)
from backend.request import ErrorCode, GenerationRequest, RequestError

LIMITS = PromptLimits(100)


def refusal(check, *arguments):
    with pytest.raises(RequestError) as raised:
        check(*arguments)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT
    return raised.value.message


def test_a_text_of_more_bytes_than_the_context_is_given_is_refused():
    limits = PromptLimits(10_000)
    limits.check(GenerationRequest("\u00e9" * 80_000, 1))
    assert refusal(limits.check, GenerationRequest("\u00e9" * 80_001, 1)) == (
        "text_input of 160002 bytes is over the limit of 10000 tokens"
    )


def test_a_lone_surrogate_does_not_hide_the_size():
    assert "165000 bytes" in refusal(LIMITS.check_text, "QUERY", "\ud83d" * 55_000)


def test_a_short_text_is_left_to_the_tokenizer():
    LIMITS.check_text("QUERY", "a" * LEAST_TEXT_BYTES)
    refusal(LIMITS.check_text, "QUERY", "a" * (LEAST_TEXT_BYTES + 1))


def test_no_text_may_be_longer_than_the_socket_takes():
    limits = PromptLimits(10**9)
    limits.check_text("QUERY", "a" * MOST_TEXT_BYTES)
    message = refusal(limits.check_text, "QUERY", "a" * (MOST_TEXT_BYTES + 1))
    assert message == f"QUERY of 33554433 bytes is over the limit of {MOST_TEXT_BYTES} bytes"


@pytest.mark.parametrize("name", ["input_ids", "prompt_token_ids"])
def test_more_token_ids_than_the_context_holds_are_refused(name):
    LIMITS.check(GenerationRequest("", 1, **{name: (5,) * 100}))
    message = refusal(LIMITS.check, GenerationRequest("", 1, **{name: (5,) * 101}))
    assert message == f"{name} of 101 tokens is over the limit of 100"


def test_a_hello_carries_the_limits():
    assert PromptLimits.from_info({"max_context_tokens": 101}) == LIMITS
    PromptLimits.from_info({}).check(GenerationRequest("a" * 100_000, 1))


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
