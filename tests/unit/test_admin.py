"""``spindle admin`` against what is no server of ours."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from backend.launcher.admin import ask
from backend.launcher.environment import LaunchError
from tests.server.harness import free_ports


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (400, b'{"error": "unknown command"}', "unknown command"),
        (404, b"<html>", "is not a Spindle server: it answered 404"),
        (500, b"[]", "is not a Spindle server: it answered 500"),
        (200, b"{}", "is not a Spindle server"),
        (200, b"<html>", "is not a Spindle server"),
    ],
)
def test_what_answers_otherwise_is_named(status, body, sentence):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(LaunchError, match=sentence):
            ask(f"http://127.0.0.1:{server.server_port}", "health", "")


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(LaunchError, match="no answer from"):
        ask(f"http://127.0.0.1:{free_ports(1)[0]}", "health", "")
