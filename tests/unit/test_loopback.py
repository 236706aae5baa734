"""Requests to this machine's own servers take no proxy, whatever the environment names."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest

from backend import PROJECT_ROOT
from backend.launcher.environment import read_settings
from backend.launcher.serving import example_command
from backend.loopback import no_proxy, open_url
from backend.openai_frontend.app import fetch_metrics
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.triton import Triton
from tests.server.harness import free_ports

NAMES = [
    written
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    for written in (name, name.upper())
]
OPENS = re.compile(
    r"\burlopen\(|insecure_channel\([^,\n]*\)|InferenceServerClient\([^,\n]*\)$", re.MULTILINE
)


@pytest.fixture(params=NAMES)
def proxied(request, monkeypatch):
    """An environment that names a proxy at which nothing listens, and no exception to it."""
    for name in (*NAMES, "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    (port,) = free_ports(1)
    monkeypatch.setenv(request.param, f"http://127.0.0.1:{port}")


class Says(BaseHTTPRequestHandler):
    """Answers every GET by its path, and every POST by 503."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def do_POST(self):
        self.send_error(503)

    def log_message(self, *_):
        """Keep quiet."""


@pytest.fixture
def local_url():
    with HTTPServer(("127.0.0.1", 0), Says) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("proxied")
def test_a_local_url_is_opened_without_a_proxy(local_url):
    with open_url(f"{local_url}/x", 5) as response:
        assert response.read() == b"/x"
    assert asyncio.run(fetch_metrics(f"{local_url}/metrics")).startswith("/metrics")


@pytest.mark.usefixtures("proxied")
def test_triton_is_asked_without_a_proxy():
    async def ask(address):
        triton = Triton(address, 4, {})
        try:
            with pytest.raises(ApiError) as raised:
                await triton.command("health")
            return str(raised.value)
        finally:
            await triton.close()

    server = grpc.server(ThreadPoolExecutor(1))  # it implements nothing, and says so
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "Method not found" in asyncio.run(ask(f"127.0.0.1:{port}"))
    finally:
        server.stop(0).wait()


def test_the_health_check_asks_without_a_proxy(local_url):
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PORT": local_url.rpartition(":")[2]}
    check = [sys.executable, str(PROJECT_ROOT / "docker" / "healthcheck.py")]
    done = subprocess.run(
        check, env={**os.environ, **proxies}, capture_output=True, text=True, check=False
    )
    assert "the engine answered 503" in done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": "a.example"}, "a.example,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a.example"}, "a.example,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_other_libraries_reach_this_machine_directly(environment, expected):
    assert no_proxy(environment) == expected


def test_the_printed_command_has_curl_pass_a_proxy_by(monkeypatch):
    settings = read_settings({})
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert "proxy" not in example_command(settings)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://127.0.0.1:9"})
    assert "curl -s --noproxy '*' http://127.0.0.1:8000/" in example_command(settings)


@pytest.mark.parametrize("room", ["backend", "bench"])
def test_nothing_opens_a_local_server_in_a_way_that_takes_proxies(room):
    sources = Path(PROJECT_ROOT, room).rglob("*.py")
    found = {path.name: OPENS.findall(path.read_text("utf-8")) for path in sources}
    assert not {name: calls for name, calls in found.items() if calls}
