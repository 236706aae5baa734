"""Checks that every request passes before its route: the id of its answer, the name
that it calls, and the key.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.openai_frontend.access import Hosts, Keys
from backend.openai_frontend.errors import ApiError

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[!-~]{1,200}")


class RequestIds:
    """Every answer has the header ``x-request-id``: the request's own, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _USABLE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, send_named)


class Guard:
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
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if begun:
                raise  # the server closes the connection
            logger.exception("request %s failed", scope["state"]["request_id"])
            await ApiError(500, "internal error").response()(scope, receive, send)
