"""The routes: OpenAI's under ``/v1``; ``/tokenize`` and ``/detokenize``; ``/health`` and
``/version``; the status page ``/``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from backend.openai_frontend.edge import REQUEST_ID, Guard, RequestIds
from backend.openai_frontend.errors import ApiError, handle_errors
from backend.openai_frontend.reader import BodyReader
from backend.openai_frontend.routes import chat_of, completion_of, text_of, tokens_of
from backend.openai_frontend.settings import FrontEnd
from backend.openai_frontend.status import PAGE, PAGE_HEADERS, fetch_metrics
from backend.openai_frontend.triton import Triton


def create_app(settings: FrontEnd, draining: threading.Event | None = None) -> FastAPI:
    """Return the application. Once ``draining`` is set it takes no new requests."""
    bodies = BodyReader(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.triton = Triton(
            settings.address,
            settings.most_texts,
            settings.special_tokens,
            admin_secret=settings.admin_secret,
        )
        bodies.start()
        yield
        bodies.close()
        await app.state.triton.close()

    app = FastAPI(
        title="Spindle",
        lifespan=lifespan,
        max_body_size=settings.max_body_bytes,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(
        Guard, keys=settings.keys, hosts=settings.hosts, draining=draining or threading.Event()
    )
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
    _add_tokens(app, bodies)
    _add_openai(app, settings, bodies)
    for route in app.routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")  # the server drops the body
    return app


def _add_status(app: FastAPI, settings: FrontEnd) -> None:
    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        status = (await request.app.state.triton.command("health"))["status"]
        if status != "ok":
            raise ApiError(503, f"the engine is {status}")
        return {"status": status}

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


def _add_tokens(app: FastAPI, bodies: BodyReader) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        triton, (text, special) = request.app.state.triton, await bodies.read(request, text_of)
        tokens = await triton.tokenize(text, add_special_tokens=special)
        health = await triton.command("health")
        length = health["max_context_tokens"]
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        tokens = await bodies.read(request, tokens_of)
        return JSONResponse({"prompt": await request.app.state.triton.detokenize(tokens)})


def _add_openai(app: FastAPI, settings: FrontEnd, bodies: BodyReader) -> None:
    created = int(time.time())

    def model(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "spindle"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in settings.models]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        settings.check_model(name)
        return model(name)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        answer = await bodies.read(request, completion_of)
        return await answer.response(request, request.app.state.triton)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        answer = await bodies.read(request, chat_of)
        return await answer.response(request, request.app.state.triton)

    @app.post("/v1/completions/render")
    async def render_completions(request: Request) -> Response:
        answer = await bodies.read(request, completion_of)
        prompts = await answer.tokens(request.app.state.triton)
        return JSONResponse([{"token_ids": ids} for ids in prompts])

    @app.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        answer = await bodies.read(request, chat_of)
        (ids,) = await answer.tokens(request.app.state.triton)
        return JSONResponse({"token_ids": ids})
