"""Which requests may call, checked before their route: by the name that they call, their key and
whether the server drains. Each gets an id.

A page on the web can have its own name resolve to this machine (DNS rebinding). Its requests are of
one site to the browser, which keeps them apart from nothing, but they carry that name as ``Host``.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import secrets
import socket
import threading
from dataclasses import dataclass
from hashlib import blake2b

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.openai_frontend.call_bodies import as_json
from backend.openai_frontend.errors import ApiError

PRIVATE_SUFFIXES = (
    ".local",
    ".lan",
    ".internal",
    ".home.arpa",
    ".svc",
    ".cluster.local",
)
"""Ends of names that no page on the web can have."""
OPEN_PATHS = ("/", "/health")
"""Paths that need no key: the page has no secrets (what it shows asks for the key), and probes have
none.
"""
OPERATOR_PATHS = ("/explain", "/metrics")
"""Paths that show figures of all requests: with several keys, only the first one opens them."""
_DIGEST_BYTES = 16
logger = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[!-~]{1,200}")


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
                f"Host {as_json(_name(header))} is not a name of this server: call it by its "
                f"address, or list the name in openai.allowed_hosts of serving.json"
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


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that callers may have; none: anyone may call."""

    keys: tuple[str, ...] = ()

    def tenant(self, path: str, headers: Headers) -> str:
        """Return the tenant that calls a path; '' if all callers are one. Raises ApiError if the
        caller lacks a key for it.
        """
        if not self.keys or path in OPEN_PATHS:
            return ""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = ""
        matches = [_is_same(secret.strip(), key) for key in self.keys]
        if not any(matches):
            raise ApiError(401, "the API key is missing or wrong")
        if path in OPERATOR_PATHS and not matches[0]:
            raise ApiError(403, f"{path} shows figures for all tenants and needs the first key")
        return tenant_of(secret.strip()) if len(self.keys) > 1 else ""


def tenant_of(key: str) -> str:
    """Return the tenant that a key stands for: the same for each process, and no way to the key."""
    return _digest(key, b"tenant")


def tenant_salt(tenant: str, salt: str | None) -> str | None:
    """Return the ``cache_salt`` of a tenant's request, from its own ``salt`` if it has one.

    Clients cannot name another tenant's, for they do not know its key.
    """
    return _digest(salt or "", tenant.encode()) if tenant else salt


def _digest(text: str, key: bytes) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=_DIGEST_BYTES, key=key).hexdigest()


def _is_same(candidate: str, key: str) -> bool:
    # Starlette decodes headers as latin-1; keys are UTF-8.
    return hmac.compare_digest(candidate.encode("latin-1"), key.encode())


class RequestIds:
    """Every answer has the header ``x-request-id``: the request's own, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        name = request_id if _USABLE_ID.fullmatch(request_id) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, send_named)


class AccessGuard:
    """Refuses requests before their bodies are read: by a foreign name, without a key, or while the
    server drains.

    It also answers one whose route raised. It is within CORS, so that the pages of a site that may
    call can read the answers.
    """

    def __init__(self, app: ASGIApp, keys: Keys, hosts: Hosts, draining: threading.Event) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._hosts.check(headers.get("host", ""))
            tenant = self._keys.tenant(scope["path"], headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if self._draining.is_set():
            refusal = ApiError(503, "the server is shutting down").response()
            await refusal(scope, receive, send)
            return
        has_begun = False

        async def watch(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if has_begun:
                raise  # the server closes the connection
            logger.exception("request %s failed", scope["state"]["request_id"])
            await ApiError(500, "internal error").response()(scope, receive, send)
