"""An app in this process, stepped by hand, whose policy can be changed between runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from backend.app import App
from backend.core.session import Session
from backend.request import GenerationRequest
from policy import AnyPolicy


class SilentSink:
    """Ignores the text, since token ids are compared, and raises what should not happen."""

    cancelled = False
    has_ended = False

    def chunk(self, delta: Any) -> None:
        """Ignore."""

    def final(self, delta: Any, reason: Any, usage: Any) -> None:
        """Note the end."""
        self.has_ended = True

    def error(self, code: Any, message: str) -> None:
        """Raise it."""
        raise RuntimeError(f"{code}: {message}")


def generate(
    app: App,
    requests: Iterable[GenerationRequest],
    together: int = 1,
    policy: AnyPolicy | None = None,
) -> list[Session]:
    """Serve requests, up to ``together`` at a time (closed loop), and return their sessions in
    order; ``policy`` replaces the app's own.
    """
    return serve(
        app, [app.session(request, SilentSink()) for request in requests], together, policy
    )


def serve(
    app: App, sessions: list[Session], together: int = 1, policy: AnyPolicy | None = None
) -> list[Session]:
    """The same for sessions that the caller has made."""
    loop, waiting, running = app.orchestrator, deque(sessions), list[Session]()
    previous = loop.cycle.runner.change(policy, policy.start()) if policy is not None else None
    try:
        while waiting or running:
            while waiting and len(running) < together:
                running.append(waiting.popleft())
                loop.submit(running[-1])
            loop.step()
            running = [session for session in running if not session.sink.has_ended]  # type: ignore[attr-defined]
    finally:
        if previous is not None:
            loop.cycle.runner.change(*previous)
    return sessions


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Return the index of the first token that differs, None where one text goes on as the other as
    far as both go.
    """
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None
    )
