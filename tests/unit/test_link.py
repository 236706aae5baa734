import socket
import threading

import pytest

from backend.ipc.messages import (
    VERSION,
    Cancel,
    Chunk,
    ErrorReply,
    Frames,
    FromStub,
    Hello,
    Submit,
    Subscribe,
    frame,
)
from backend.request import ErrorCode, GenerationRequest, RequestError
from backend.triton_adapter.link import DOWN, EngineLink


class Engine:
    """The engine process's end: accepts one connection at a time."""

    def __init__(self, path):
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(5)
        self.listener.bind(str(path))
        self.listener.listen()

    def accept(self, version=VERSION):
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(5)
        self.decoder = Frames(FromStub)
        self.messages = self._messages()
        self.send(Hello(version=version, info={"max_request_s": 600.0}))

    def send(self, message):
        self.peer.sendall(frame(message))

    def _messages(self):
        while data := self.peer.recv(4096):
            yield from self.decoder.feed(data)

    def close(self):
        self.peer.close()
        self.listener.close()


class Recorder:
    def __init__(self):
        self.messages = []
        self.heard, self.lost = threading.Event(), threading.Event()

    def on_message(self, message):
        self.messages.append(message)
        self.heard.set()

    def on_lost(self):
        self.lost.set()


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def link(tmp_path, recorder):
    made = EngineLink(
        tmp_path / "s",
        recorder.on_message,
        recorder.on_lost,
        greeting=(Subscribe(),),
        grace_s=0.5,
    )
    made.start()
    yield made
    made.close()


def test_a_link_waits_for_the_socket_greets_and_carries_messages(link, recorder, tmp_path):
    assert not link.wait(0.0)
    engine = Engine(tmp_path / "s")
    engine.accept()
    assert link.wait(5)
    link.send(Cancel(id=7))
    assert [next(engine.messages) for _ in range(3)] == [Hello(), Subscribe(), Cancel(id=7)]
    engine.send(Chunk(id=7, text="ü"))
    assert recorder.heard.wait(5)
    assert recorder.messages == [Chunk(id=7, text="ü")]
    engine.close()


def test_what_is_sent_while_the_engine_is_down_waits_and_goes_first(link, recorder, tmp_path):
    link.send(Cancel(id=1))
    link.send(Cancel(id=2))
    engine = Engine(tmp_path / "s")
    engine.accept()
    assert link.wait(5)
    link.send(Cancel(id=3))
    assert [next(engine.messages).id for _ in range(5)] == [0, 0, 1, 2, 3]
    engine.close()


def test_what_waited_waits_on_when_the_engine_goes_before_it_has_it(link, tmp_path):
    link.send(Submit(id=1, request=GenerationRequest("x" * 4_000_000, 1)))
    engine = Engine(tmp_path / "s")
    engine.accept()
    engine.close()
    engine = Engine(tmp_path / "s")
    engine.accept()
    assert [type(next(engine.messages)) for _ in range(3)] == [Hello, Subscribe, Submit]
    assert link.wait(5)
    engine.close()


def test_a_lost_engine_is_reported_refused_after_a_while_and_found_again(link, recorder, tmp_path):
    engine = Engine(tmp_path / "s")
    engine.accept()
    assert link.wait(5)
    engine.close()
    assert recorder.lost.wait(5)
    link.send(Cancel(id=1))
    assert recorder.heard.wait(5)
    assert recorder.messages == [ErrorReply(id=1, code=ErrorCode.UNAVAILABLE, message=DOWN)]
    with pytest.raises(RequestError, match="starting or restarting") as refusal:
        link.send(Cancel(id=2))
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    engine = Engine(tmp_path / "s")
    engine.accept()
    assert link.wait(5)
    engine.close()


def test_text_that_is_no_unicode_is_an_invalid_argument(link):
    with pytest.raises(RequestError, match="lone surrogate at character 1") as refusal:
        link.send(Submit(id=1, request=GenerationRequest("a\ud800", 1)))
    assert refusal.value.code is ErrorCode.INVALID_ARGUMENT


def test_another_protocol_version_is_not_used(link, recorder, tmp_path, caplog):
    engine = Engine(tmp_path / "s")
    engine.accept(version=99)
    assert list(engine.messages) == [Hello(), Subscribe()]  # and the link has hung up
    assert not link.wait(0.0)
    assert not recorder.lost.is_set()
    assert "protocol version 99" in caplog.text
    engine.close()


def test_an_engine_that_stopped_reading_is_given_up(recorder, tmp_path):
    engine = Engine(tmp_path / "s")
    link = EngineLink(tmp_path / "s", recorder.on_message, recorder.on_lost, send_limit_s=1)
    link.start()
    engine.accept()
    assert link.wait(5)
    with pytest.raises(RequestError, match="refuses requests"):
        link.send(Submit(id=1, request=GenerationRequest("x" * 4_000_000, 1)))
    assert recorder.lost.wait(5)
    engine.close()
    link.close()
