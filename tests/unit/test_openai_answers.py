"""The end of an answer whose client leaves before there is anything to send."""

import asyncio
from types import SimpleNamespace

import pytest

from backend.openai_frontend.answers import RequestedTexts, tensors
from backend.openai_frontend.choices import COMPLETION, Style
from backend.openai_frontend.schema import CompletionRequest


class QueuedTriton:
    """Answers nothing, as where all places are taken or a prompt is long."""

    def __init__(self):
        self.asked = self.cancelled = False

    async def generate(self, prompts, options, names, n):
        """Wait for ever."""
        self.asked = True
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.cancelled = True


class LeavingClient:
    """A request whose client leaves once it has been asked for."""

    state = SimpleNamespace(tenant="")

    def __init__(self, triton):
        self._triton = triton

    async def is_disconnected(self):
        return self._triton.asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["a", "b"]}])
def test_a_request_that_waits_ends_when_its_client_leaves(stream, more):
    body = CompletionRequest(**{"model": "m", "prompt": "a", "stream": stream, **more})

    async def ask():
        triton = QueuedTriton()
        answer = RequestedTexts(body, Style(COMPLETION), body.prompt, tensors(body, 4, 16))
        response = await asyncio.wait_for(answer.response(LeavingClient(triton), triton), 5)
        await asyncio.sleep(0)
        return response.status_code, triton.cancelled

    assert asyncio.run(ask()) == (499, True)
