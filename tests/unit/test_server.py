"""Messages that the engine process's IO thread must never lose, without a process around it."""

import itertools
import json
import select
import socket
import threading
import time
import types

import pytest

from backend.core.preparation import Preparation
from backend.ipc.messages import Cancel, Chunk, Encode, Submit
from backend.ipc.server import LONG_TEXT_CHARACTERS, Server, StubConnection
from backend.request import ErrorCode, GenerationRequest, RequestError
from backend.sampling.guides import Grammars
from backend.tokenizer import ByteTokenizer
from tests.fakes.waiting import wait_until


@pytest.fixture
def app():
    """The server's requests to a deployment."""
    return types.SimpleNamespace(
        orchestrator=None,
        tokenizer=ByteTokenizer(),
        tracing=types.SimpleNamespace(begin=lambda trace: None),
        config=types.SimpleNamespace(
            limits=types.SimpleNamespace(max_queued_requests=2, max_active_requests=1)
        ),
    )


@pytest.fixture
def server(app, tmp_path):
    return Server(app, tmp_path / "socket", tmp_path / "serving.json")


def connected(**limits):
    near, far = socket.socketpair()
    near.setblocking(False)
    return StubConnection(near, **limits), far


def test_a_post_while_the_waker_is_read_does_not_silence_the_next_one(server):
    connection, _far = connected()
    woken = server._woken

    class Between:
        def recv(self, size):
            server.post(connection, Chunk())
            return woken.recv(size)

    server.post(connection, Chunk())
    server._woken = Between()
    server._handle(types.SimpleNamespace(data=None, fileobj=server._woken), 0)
    assert len(connection.frames) == 2
    server.post(connection, Chunk())
    assert select.select([woken], [], [], 0)[0], "the IO thread would sleep on"


def test_waiting_messages_wake_the_io_thread_once_they_are_released(server):
    connection, _far = connected()

    def is_woken():
        return bool(select.select([server._woken], [], [], 0)[0])

    server.hold(True)
    server.post(connection, Chunk())
    server.post(connection, Chunk())
    assert not is_woken()
    server.hold(False)
    assert len(connection.frames) == 2
    assert is_woken()
    server._handle(types.SimpleNamespace(data=None, fileobj=server._woken), 0)
    server._flush_dirty()
    server.hold(True)
    server.hold(False)
    assert not is_woken(), "there is nothing to send"
    server.post(connection, Chunk())
    assert is_woken()


@pytest.mark.parametrize("ends", [True, False])
def test_a_loop_that_ends_or_hangs_ends_the_service(tmp_path, app, caplog, ends):
    hang = threading.Event()

    class Loop:
        alive_s = time.monotonic()

        def run(self, stop):
            if not ends:
                hang.wait(30)

        def wake(self):
            hang.set()  # so that the test need not wait for the join

    app.loop = Loop()
    server = Server(app, tmp_path / "socket", tmp_path / "serving.json", stuck_limit_s=0.2)
    assert server.serve() is False
    assert not (tmp_path / "socket").exists()
    assert ends or "the loop is stuck: one step has taken" in caplog.text


def test_a_reader_that_is_slow_gets_everything_in_order():
    connection, far = connected()
    frames = [bytes([i]) * 100_000 for i in range(40)]
    connection.frames.extend(frames)
    received = bytearray()
    while len(received) < 4_000_000:
        connection.flush()
        received += far.recv(1 << 20)
    assert bytes(received) == b"".join(frames)
    assert not connection.unsent


def test_a_reader_that_stopped_is_given_up():
    connection, _far = connected(most_unsent_bytes=1_000_000)
    connection.frames.append(bytes(3_000_000))
    with pytest.raises(ConnectionResetError, match="bytes unread"):
        connection.flush()


class Holding:
    """A tokenizer that waits with long texts until it may go on, and notes what it was given."""

    def __init__(self):
        self.go_on = threading.Event()
        self.texts = []

    def __getattr__(self, name):
        return getattr(ByteTokenizer(), name)

    def encode(self, text, add_special_tokens=True):
        self.texts.append(text[:1])
        if len(text) > LONG_TEXT_CHARACTERS:
            assert self.go_on.wait(30)
        return [1]


class Loop:
    """An idle loop, which takes no session and lets no request live longer than its own time."""

    def __init__(self, server):
        self._server = server

    def counts(self):
        return 0, len(self._server.guided)

    def longest_s(self, request):
        return request.timeout_s or 600.0

    def lateness(self, request):
        return "late"

    def wake(self):
        pass


def converting(server, app, context=2**31):
    tokenizer, config = Holding(), types.SimpleNamespace(add_special_tokens=True)
    grammars = Grammars(ByteTokenizer())
    app.preparation = Preparation(config, tokenizer, 257, context, lambda _: False, grammars)
    app.loop = Loop(server)
    app.refused = []
    app.step_stats = types.SimpleNamespace(request=app.refused.append)
    connection, _far = connected()
    server.connections.add(connection)
    return connection, tokenizer


def encode(server, connection, text):
    connection.greeted = True
    server.receive(connection, Encode(prompts=[text], add_special_tokens=[None], words=[]))


def test_a_short_text_does_not_wait_for_a_long_one(server, app):
    connection, tokenizer = converting(server, app)
    encode(server, connection, "a" * (LONG_TEXT_CHARACTERS + 1))
    encode(server, connection, "b")
    wait_until(lambda: len(connection.frames) == 1)
    assert sorted(tokenizer.texts) == ["a", "b"]
    tokenizer.go_on.set()
    wait_until(lambda: len(connection.frames) == 2)


def test_a_text_that_cannot_fit_is_never_tokenised(server, app):
    connection, tokenizer = converting(server, app, context=101)
    encode(server, connection, "a" * 100_000)
    wait_until(lambda: connection.frames)
    assert b"QUERY of 100000 bytes is over the limit of 100 tokens" in connection.frames[0]
    assert tokenizer.texts == []


def test_a_request_without_a_grammar_does_not_wait_for_one_with(server, app):
    connection, _tokenizer = converting(server, app)
    prepared, go_on = [], threading.Event()

    def session(request, ticket):
        assert request.guide is None or go_on.wait(30)
        prepared.append(request.text_input)
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "no")

    app.session = session
    connection.greeted = True
    guided = GenerationRequest("guided", 1, guide_type="regex", guide="a")
    for number, request in enumerate((guided, GenerationRequest("plain", 1))):
        server.receive(connection, Submit(id=number, request=request))
    wait_until(lambda: prepared)
    assert prepared == ["plain"]
    go_on.set()
    wait_until(lambda: len(prepared) == 2)


def test_requests_cancelled_while_they_waited_are_not_tokenised(server, app):
    connection, _tokenizer = converting(server, app)
    prepared, go_on = [], threading.Event()

    def session(request, ticket):
        prepared.append(request.text_input)
        assert go_on.wait(30)
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "too long")

    app.session = session
    connection.greeted = True
    for number in range(3):
        server.receive(connection, Submit(id=number, request=GenerationRequest(f"{number}", 1)))
    wait_until(lambda: prepared)
    for number in (1, 2):
        server.receive(connection, Cancel(id=number))
    go_on.set()
    wait_until(lambda: len(connection.frames) == 3)
    assert prepared == ["0"]
    assert not connection.tickets


@pytest.mark.parametrize("links", [400, 3400])
def test_a_deep_grammar_does_not_overflow_the_stack(server, app, links):
    """3,400 schemas, each referring to the next, are as many as a grammar can have."""
    schemas = {
        f"d{link}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{link + 1}"}}}
        for link in range(links)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**schemas, f"d{links}": {"type": "string"}}}
    connection, _tokenizer = converting(server, app)
    connection.greeted = True
    grammars, made = app.preparation.grammars, []

    def session(request, ticket):
        made.append(grammars.guide("json_schema", request.guide, ByteTokenizer().end_ids))
        raise RequestError(ErrorCode.UNAVAILABLE, "there is no loop")

    app.session = session
    request = GenerationRequest("a", 1, guide_type="json_schema", guide=json.dumps(schema))
    server.receive(connection, Submit(id=1, request=request))
    wait_until(lambda: made)
    (guide,) = made
    assert guide.mask(list(b'{"a')) is not None


def guided(text, guide="a", **more):
    return GenerationRequest(text, 1, guide_type="regex", guide=guide, **more)


class Reading:
    """A server whose first grammar is being read until ``go_on`` is set."""

    def __init__(self, server, app):
        self.connection, _tokenizer = converting(server, app)
        self.connection.greeted = True
        self.prepared, self.go_on = [], threading.Event()
        self._server, self._numbers = server, itertools.count()
        app.session = self._session
        self.submit(guided("bomb", guide="b"))
        wait_until(lambda: self.prepared)

    def submit(self, *requests):
        for request in requests:
            submit = Submit(id=next(self._numbers), request=request)
            self._server.receive(self.connection, submit)

    def _session(self, request, ticket):
        self.prepared.append(request.text_input)
        assert request.text_input != "bomb" or self.go_on.wait(30)
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "no session")


def test_requests_that_wait_for_a_grammar_have_the_room_of_the_queue(server, app):
    reading = Reading(server, app)
    reading.submit(*(guided(f"{n}", guide=f"{n}") for n in range(4)))
    assert len(server.guided) == 3  # one place in the batch, two in the queue
    assert app.refused == ["unavailable"] * 2
    assert b"Exceeds maximum queue size 2" in reading.connection.frames[0]
    reading.go_on.set()
    wait_until(lambda: not server.guided)
    assert reading.prepared == ["bomb", "0", "1"]


def test_a_request_whose_grammar_is_known_waits_for_no_other(server, app):
    reading = Reading(server, app)
    app.preparation.grammars.guide("regex", "a", ByteTokenizer().end_ids)
    reading.submit(guided("known"))
    wait_until(lambda: reading.prepared == ["bomb", "known"])
    reading.go_on.set()


@pytest.mark.parametrize("at_work", [False, True])
def test_a_request_that_waits_for_its_grammar_ends_in_time(server, app, at_work):
    reading = Reading(server, app)
    late = guided("late", guide="c", timeout_s=1e-9)
    reading.submit(guided("waits", guide="d"), *([] if at_work else [late]))
    if at_work:
        next(iter(reading.connection.tickets.values())).arrived_s = -1e9
    server.guided.end_over()
    assert app.refused == ["unavailable"]
    assert b"late" in reading.connection.frames[0]
    reading.go_on.set()
    wait_until(lambda: not server.guided)
    assert reading.prepared == ["bomb", "waits"]
    wait_until(lambda: len(reading.connection.frames) == (2 if at_work else 3))


def test_a_request_that_is_cancelled_gives_its_place_in_the_queue_back(server, app):
    reading = Reading(server, app)
    reading.submit(guided("1", guide="1"), guided("2", guide="2"))
    server.receive(reading.connection, Cancel(id=1))
    server.guided.end_over()
    assert len(server.guided) == 2
    assert app.refused == ["cancelled"]
    reading.go_on.set()
    wait_until(lambda: not server.guided)
    assert reading.prepared == ["bomb", "2"]
