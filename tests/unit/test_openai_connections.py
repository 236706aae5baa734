"""Connections of the front end's server: how long idle ones stay, and where it listens."""

import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest

from backend.launcher.settings import port_trouble, read_settings
from backend.openai_frontend.__main__ import listen, server_config
from backend.openai_frontend.app import create_app
from backend.openai_frontend.draining import DrainingServer
from backend.openai_frontend.settings import FrontEnd
from tests.server.harness import free_ports


@contextmanager
def front_end(bind="127.0.0.1", **environment):
    """Serve with these variables; give the port."""
    config = server_config(create_app(FrontEnd("127.0.0.1:1", ("m",))), read_settings(environment))
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
    with front_end(OPENAI_KEEP_ALIVE_S="1") as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        assert [status(connection), status(connection)] == [200, 200]
        assert connection.sock.recv(1) == b"", "the server closes it"
        assert status(connection) == 0
        connection.close()


def test_an_idle_connection_stays_longer_than_at_usual_proxies():
    app = create_app(FrontEnd("127.0.0.1:1", ("m",)))
    assert server_config(app, read_settings({})).timeout_keep_alive == 75


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
