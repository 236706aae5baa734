import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.ipc import wire


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=5),
    st.integers(1, 7),
)
def test_messages_survive_any_cut_of_the_byte_stream(bodies, size):
    messages = [{**body, "type": "chunk"} for body in bodies]
    stream = b"".join(wire.encode(message) for message in messages)
    decoder = wire.Decoder()
    received = [
        m
        for start in range(0, len(stream), size)
        for m in decoder.feed(stream[start : start + size])
    ]
    assert received == messages


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x02{]", "not JSON"),
        (b"\x00\x00\x00\x02[]", "object with a type"),
        (b"\x00\x00\x00\x02{}", "object with a type"),
    ],
)
def test_a_malformed_frame_is_an_error_that_says_why(frame, words):
    with pytest.raises(wire.WireError, match=words):
        list(wire.Decoder().feed(frame))


def test_another_version_is_refused_by_both_numbers():
    with pytest.raises(wire.WireError, match="version 99, this side 1"):
        wire.check_hello({"type": "hello", "version": 99})
    with pytest.raises(wire.WireError, match="expected hello, got 'chunk'"):
        wire.check_hello({"type": "chunk"})
    assert wire.check_hello(wire.hello(info=1))["info"] == 1
