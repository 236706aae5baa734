"""The routes: OpenAI's under ``/v1``; ``/tokenize`` and ``/detokenize``; ``/health`` and
``/version``; the status page ``/``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from backend.openai_frontend.answers import Answer, tensors
from backend.openai_frontend.bodies import read_body
from backend.openai_frontend.choices import CHAT, COMPLETION, Style
from backend.openai_frontend.edge import REQUEST_ID, Guard, RequestIds
from backend.openai_frontend.errors import ApiError, handle_errors
from backend.openai_frontend.guides import guide_of
from backend.openai_frontend.schema import (
    INT32,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from backend.openai_frontend.status import PAGE, PAGE_HEADERS, fetch_metrics
from backend.openai_frontend.template import ChatTemplate
from backend.openai_frontend.triton import Triton

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own for completions; chats go on to the end of the context."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Settings: where Triton's gRPC is, the model's public name, its chat template, and who may
    call ('': anyone; (): no site).
    """

    address: str
    model: str
    template: ChatTemplate | None = None
    api_key: str = ""
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    metrics_url: str = ""
    spec_decode_metrics: str = "summary"
    version: str = ""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model's name."""
        if name not in (None, self.model):
            message = f"The model {name!r} does not exist; there is {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def prompt(self, messages: list[Message], tools: list[Tool] | None) -> str:
        """Return the prompt of a conversation. Raises ApiError."""
        if self.template is None:
            raise ApiError(400, "the model has no chat template", "messages")
        shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        try:
            return self.template.prompt([message.as_dict() for message in messages], shown or None)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None


def create_app(settings: FrontEnd) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.triton = Triton(settings.address)
        yield
        await app.state.triton.close()

    app = FastAPI(
        title="Spindle",
        lifespan=lifespan,
        max_body_size=settings.max_body_bytes,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(Guard, api_key=settings.api_key)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_middleware(RequestIds)
    handle_errors(app)
    _add_status(app, settings)
    _add_tokens(app, settings)
    _add_openai(app, settings)
    return app


def _add_status(app: FastAPI, settings: FrontEnd) -> None:
    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        return {"status": (await request.app.state.triton.command("health"))["status"]}

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": settings.version}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await fetch_metrics(settings.metrics_url))

    @app.get("/explain")
    async def explain(request: Request) -> dict[str, Any]:
        reply: dict[str, Any] = await request.app.state.triton.command("explain")
        return reply


def _add_tokens(app: FastAPI, settings: FrontEnd) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeRequest)
        settings.check_model(body.model)
        text = body.prompt if body.messages is None else settings.prompt(body.messages, body.tools)
        triton = request.app.state.triton
        tokens, health = await triton.tokenize(text), await triton.command("health")
        return {
            "count": len(tokens),
            "max_model_len": health["max_context_tokens"],
            "tokens": tokens,
        }

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, DetokenizeRequest)
        settings.check_model(body.model)
        return {"prompt": await request.app.state.triton.detokenize(body.tokens)}


def _add_openai(app: FastAPI, settings: FrontEnd) -> None:
    created = int(time.time())

    def model() -> dict[str, Any]:
        return {"id": settings.model, "object": "model", "created": created, "owned_by": "spindle"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        settings.check_model(name)
        return model()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        settings.check_model(body.model)
        silent = body.max_tokens == 0
        # the text model writes one token at least: it never sees a max_tokens of 0
        most = 1 if silent else body.max_tokens
        options = tensors(body, most, DEFAULT_MAX_TOKENS, echo=body.echo, top=body.logprobs)
        style = Style(COMPLETION, body.logprobs is not None, echo=body.echo, silent=silent)
        answer = Answer(body, style, body.prompt, options, settings.spec_decode_metrics)
        return await answer.response(request, request.app.state.triton)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        settings.check_model(body.model)
        called = body.tool_choice is None or body.tool_choice.type != "none"
        prompt = settings.prompt(body.messages, body.tools if called else None)
        top = (body.top_logprobs or 0) if body.logprobs else None
        options = tensors(body, body.max_completion_tokens or body.max_tokens, INT32, top=top)
        tool, guide = guide_of(body)
        options |= guide
        style = Style(CHAT, body.logprobs, tool, parallel=body.parallel_tool_calls)
        if body.tools and called and tool is None and settings.template is not None:
            style = replace(
                style, calls=settings.template.calls, names=tuple(body.function_names())
            )
        answer = Answer(body, style, [prompt], options, settings.spec_decode_metrics)
        return await answer.response(request, request.app.state.triton)
