"""Whole deployments over fake engines, served in the test's own thread."""

from __future__ import annotations

from typing import Any

from backend.app import App, build
from backend.config import parse_config
from backend.request import GenerationRequest
from tests.fakes.clients import Sink

FAKE: dict[str, Any] = {
    "target": {"engine": "tests.fakes.fake"},
    "drafts": [
        {"name": "d0", "engine": "tests.fakes.fake"},
        {"name": "lookup", "engine": "lookup"},
    ],
}
"""A ``serving.json`` that needs no model."""


def fake_app(**settings: Any) -> App:
    """Return the deployment of ``FAKE`` with some other settings."""
    return build(parse_config({**FAKE, **settings}))


def submit(app: App, request: GenerationRequest) -> Sink:
    """Hand a request to the loop and return its client."""
    sink = Sink()
    app.loop.submit(app.session(request, sink))
    return sink


def ask(app: App, text: str, max_tokens: int, **options: Any) -> Sink:
    """Hand a request to the loop whose output has exactly ``max_tokens``; return its client."""
    return submit(app, GenerationRequest(text, max_tokens, end_id=-1, **options))


def finish(app: App, *sinks: Sink) -> None:
    """Run the loop until all have their last reply."""
    while not all(sink.has_ended for sink in sinks):
        assert app.loop.step(), "nothing to do, and a request has no final reply"
