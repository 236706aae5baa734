"""Requests to servers on this machine: never sent to the proxies that the environment names."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
"""Options of a gRPC channel to a local server; its messages may have any size, as with
``tritonclient``.
"""
_HOSTS = ("localhost", "127.0.0.1", "::1")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(request: urllib.request.Request | str, timeout_s: float) -> HTTPResponse:
    """Send a request and return the open response. Raises OSError, HTTPError included."""
    response: HTTPResponse = _OPENER.open(request, timeout=timeout_s)
    return response


def no_proxy(environment: Mapping[str, str]) -> str:
    """Return the variable ``no_proxy`` with which other libraries reach this machine directly."""
    hosts = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    return hosts if hosts == "*" else ",".join(filter(None, [hosts, *_HOSTS]))
