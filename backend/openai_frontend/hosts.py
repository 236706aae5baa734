"""Names by which requests may call the front end.

A page on the web can have its own name resolve to this machine (DNS rebinding). Its requests are of
one site to the browser, which keeps them apart from nothing, but they carry that name as ``Host``.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.literals import as_json

PRIVATE_SUFFIXES = (
    ".local",
    ".lan",
    ".internal",
    ".home.arpa",
    ".svc",
    ".cluster.local",
)
"""Ends of names that no page on the web can have."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which names are the server's. Addresses and ``localhost`` always are: no page on the web can
    have its own name resolve to them *and* be called by them.
    """

    names: tuple[str, ...] = ("*",)
    """Names besides those; ``*.example.com``: all below it; ``*``: all."""
    is_open: bool = False
    """Whether other machines can call: by names without a dot and private ones, too."""

    def check(self, header: str) -> None:
        """Raise ApiError if a request with this ``Host`` may not call."""
        if not self.allow(header):
            message = (
                f"Host {as_json(_name(header))} is no name of this server: call it by its address, "
                f"or list the name in OPENAI_ALLOWED_HOSTS"
            )
            raise ApiError(403, message)

    def allow(self, header: str) -> bool:
        """Return whether a request with this ``Host`` may call; browsers always send one."""
        host = _name(header)
        if not host or "*" in self.names or _is_address(host):
            return True
        if host == "localhost" or host.endswith(".localhost"):
            return True
        if self.is_open and ("." not in host or host.endswith(PRIVATE_SUFFIXES)):
            return True
        return any(_matches(host, name.lower()) for name in (*self.names, socket.gethostname()))


def _name(header: str) -> str:
    """Return the name or address in a ``Host``, without the port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _matches(host: str, name: str) -> bool:
    return host.endswith(name[1:]) if name.startswith("*.") else host == name
