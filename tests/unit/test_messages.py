import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.ipc.messages import (
    VERSION,
    Chunk,
    Final,
    FrameError,
    Frames,
    FromEngine,
    FromStub,
    Hello,
    ProtocolVersionError,
    Submit,
    check_hello,
    frame,
)
from backend.request import FinishReason, GenerationRequest


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=5), st.integers(1, 7))
def test_messages_survive_any_cut_of_the_byte_stream(texts, size):
    messages = [Chunk(id=n, text=text, top=[[(b"\xff", -0.5)]]) for n, text in enumerate(texts)]
    stream = b"".join(map(frame, messages))
    frames = Frames(FromEngine)
    received = [
        message
        for start in range(0, len(stream), size)
        for message in frames.feed(stream[start : start + size])
    ]
    assert received == messages


def test_a_request_arrives_as_it_was_sent():
    request = GenerationRequest(
        "hé", 3, seed=2**64 - 1, bias=((1, 0.5),), stop_word_ids=((1, 2),), input_ids=(4, 5)
    )
    (sent,) = Frames(FromStub).feed(frame(Submit(id=7, request=request, trace={"a": "b"})))
    assert (sent.id, sent.request, sent.trace) == (7, request, {"a": "b"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x02{]", "not a message"),
        (b"\x00\x00\x00\x01\x80", "not a message"),
        (frame(Hello()).replace(b"Hello", b"Howdy"), "not a message"),
        (
            frame(
                Final(finish_reason=FinishReason.LENGTH, num_input_tokens=1, num_output_tokens=1)
            ),
            "not a message",
        ),
    ],
)
def test_a_malformed_frame_is_an_error_that_says_why(data, words):
    with pytest.raises(FrameError, match=words):
        list(Frames(FromStub).feed(data))


def test_another_version_is_refused_by_both_numbers():
    with pytest.raises(ProtocolVersionError, match=f"version 99, this side {VERSION}"):
        check_hello(Hello(version=99))
    with pytest.raises(ProtocolVersionError, match="expected a hello, got Chunk"):
        check_hello(Chunk())
    assert check_hello(Hello(info={"a": 1})).info == {"a": 1}
