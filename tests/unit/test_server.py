"""What the engine process's IO thread must never lose, without a process around it."""

import select
import socket
import threading
import time
import types

import pytest

from backend.ipc import server as module
from backend.ipc.messages import Chunk
from backend.ipc.server import Connection, Server
from backend.tokenizer import ByteTokenizer


@pytest.fixture
def server(tmp_path):
    return Server(
        types.SimpleNamespace(orchestrator=None, tokenizer=ByteTokenizer()),
        tmp_path / "socket",
        tmp_path / "serving.json",
    )


def connected():
    near, far = socket.socketpair()
    near.setblocking(False)
    return Connection(near), far


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


@pytest.mark.parametrize("ends", [True, False])
def test_a_loop_that_ends_or_hangs_ends_the_service(tmp_path, monkeypatch, caplog, ends):
    monkeypatch.setattr(module, "STUCK_LIMIT_S", 0.2)
    hang = threading.Event()

    class Loop:
        alive_s = time.monotonic()

        def run(self, stop):
            if not ends:
                hang.wait(30)

        def wake(self):
            hang.set()  # so that the test need not wait for the join

    server = Server(
        types.SimpleNamespace(orchestrator=Loop(), stats=None, tokenizer=ByteTokenizer()),
        tmp_path / "socket",
        tmp_path / "serving.json",
    )
    assert server.serve() is False
    assert not (tmp_path / "socket").exists()
    assert ends or "the loop has been in one step" in caplog.text


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


def test_a_reader_that_stopped_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 1_000_000)
    connection, _far = connected()
    connection.frames.append(bytes(3_000_000))
    with pytest.raises(ConnectionResetError, match="bytes unread"):
        connection.flush()
