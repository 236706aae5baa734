"""Connections of the front end's server: how long idle ones stay, and where it listens."""

import json
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection

import pytest

from backend.config import OpenaiConfig
from backend.launcher.environment import port_trouble
from backend.openai_frontend.__main__ import listen, server_config
from backend.openai_frontend.app import create_app
from backend.openai_frontend.connections import Connection, DrainingServer
from backend.openai_frontend.front_end import FrontEnd
from tests.server.harness import free_ports


@contextmanager
def front_end(bind="127.0.0.1", keep_alive_s=75):
    """Serve; give the port."""
    config = server_config(create_app(FrontEnd("127.0.0.1:1", ("m",))), keep_alive_s)
    listener = listen(bind, 0)
    server = DrainingServer(config, threading.Event(), 1.0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def status(connection):
    """Return the status of the answer to a request; 0 where the server has closed."""
    try:
        connection.request("GET", "/version")
        response = connection.getresponse()
    except OSError:
        return 0
    response.read()
    return response.status


def test_an_idle_connection_stays_as_long_as_is_set():
    with front_end(keep_alive_s=1) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        assert [status(connection), status(connection)] == [200, 200]
        assert connection.sock.recv(1) == b"", "the server closes it"
        assert status(connection) == 0
        connection.close()


def test_an_idle_connection_stays_longer_than_at_usual_proxies():
    assert OpenaiConfig().keep_alive_s > 60


@pytest.mark.slow
def test_an_idle_connection_is_served_after_six_seconds():
    with front_end() as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        assert status(connection) == 200
        time.sleep(6)
        assert status(connection) == 200
        connection.close()


@pytest.mark.parametrize(
    ("bind", "reached"),
    [("127.0.0.1", {"127.0.0.1"}), ("::1", {"::1"}), ("::", {"127.0.0.1", "::1"})],
)
def test_it_listens_where_it_should_and_on_all_of_ipv4_where_on_all_of_ipv6(bind, reached):
    if ":" in bind and port_trouble("::1", 0):
        pytest.skip("this machine has no IPv6")
    with front_end(bind) as port:
        for host in ("127.0.0.1", "::1"):
            connection = HTTPConnection(host, port, timeout=30)
            assert (status(connection) == 200) == (host in reached)
            connection.close()


def test_a_port_that_is_taken_is_named():
    (port,) = free_ports(1)
    with listen("127.0.0.1", port), pytest.raises(SystemExit, match=f"OPENAI_PORT {port} on BIND"):
        listen("127.0.0.1", port)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(port):
    return closing(socket.create_connection(("127.0.0.1", port), timeout=30))


def rest(connection):
    """Return all that a server sends until it closes."""
    return b"".join(iter(partial(connection.recv, 65536), b"")).decode()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", ""),
        (b"GET /", "HTTP/1.1 408 "),
        (HEAD, "HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 9\r\n\r\n", "HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 9\r\n\r\n{", "HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", "HTTP/1.1 408 "),
    ],
)
def test_a_request_that_does_not_come_in_time_ends(monkeypatch, sent, answer):
    monkeypatch.setattr(Connection, "head_s", 0.2)
    monkeypatch.setattr(Connection, "body_s", 0.2)
    with front_end() as port, connected(port) as connection:
        connection.sendall(sent)
        text = rest(connection)
        assert text.startswith(answer)
        assert bool(text) == bool(answer)
        if answer:
            error = json.loads(text.partition("\r\n\r\n")[2])["error"]
            assert error["type"] == "invalid_request_error"
            assert "did not arrive in time" in error["message"]


@pytest.mark.medium
def test_a_request_that_trickles_has_no_more_time_and_an_idle_connection_has(monkeypatch):
    monkeypatch.setattr(Connection, "head_s", 0.5)
    with front_end() as port:
        with connected(port) as connection, suppress(OSError):
            for letter in b"GET /version HTTP/1.1\r\nX: " + b"x" * 3000:
                connection.sendall(bytes([letter]))
                time.sleep(0.01)
            pytest.fail("a head may take as long as it likes")
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        assert status(connection) == 200
        time.sleep(1)
        assert status(connection) == 200
        connection.sock.sendall(b"GET /")
        assert rest(connection.sock).startswith("HTTP/1.1 408 ")
        connection.close()


@pytest.mark.medium
def test_a_body_that_comes_fast_enough_has_time(monkeypatch):
    monkeypatch.setattr(Connection, "body_s", 0.2)
    part = b" " * 32768  # two seconds' worth
    with front_end() as port, connected(port) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (5 * len(part) + 2))
        for _ in range(5):
            connection.sendall(part)
            time.sleep(0.2)
        connection.sendall(b"{}")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_silent_connections_give_way_to_requests(monkeypatch):
    monkeypatch.setattr(Connection, "most", 20)
    with front_end() as port, ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(200)]
        for connection in silent[::2]:
            with suppress(OSError):  # it may have given way
                connection.sendall(b"GET /")
        for _ in range(30):
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            stack.callback(connection.close)
            assert status(connection) == 200
        assert silent[1].recv(1) == b"", "it has waited longest"


def test_connections_that_are_all_in_use_are_kept(monkeypatch):
    monkeypatch.setattr(Connection, "most", 3)
    with front_end() as port, ExitStack() as stack:
        busy = [stack.enter_context(connected(port)) for _ in range(3)]
        for connection in busy:
            connection.sendall(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        with connected(port) as refused:
            assert rest(refused).startswith("HTTP/1.1 503 ")
        for connection in busy:
            connection.sendall(b"{}")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        stack.callback(connection.close)
        assert status(connection) == 200


def test_an_upgrade_that_is_not_served_is_answered(monkeypatch):
    with front_end() as port, connected(port) as connection:
        connection.sendall(
            b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
