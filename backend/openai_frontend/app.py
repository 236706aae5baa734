"""The routes: OpenAI's under ``/v1``; ``/tokenize`` and ``/detokenize``; ``/health`` and
``/version``; the status page ``/``, one file without outside resources, which reads ``/metrics``
and ``/explain`` and asks like any client.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from backend.loopback import open_url
from backend.openai_frontend.access import REQUEST_ID, AccessGuard, RequestIds
from backend.openai_frontend.errors import ApiError, handle_errors
from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.reader import BodyReader
from backend.openai_frontend.routes import chat_of, completion_of, text_of, tokens_of
from backend.openai_frontend.triton import Triton

PAGE = (Path(__file__).parent / "status.html").read_text("utf-8")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
LIMIT_S = 5.0
VLLM_COUNTERS = {
    "spindle_verified_proposals_total": "vllm:spec_decode_num_drafts_total",
    "spindle_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "spindle_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
}
"""Counters that AIPerf and ``vllm bench serve`` read, by the one each is the sum of."""


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
        AccessGuard,
        keys=settings.keys,
        hosts=settings.hosts,
        draining=draining or threading.Event(),
    )
    if settings.options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.options.cors_origins),
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


def with_vllm_counters(metrics: str) -> str:
    """Return metrics with vLLM's counters of speculation after them."""
    sums = dict.fromkeys(VLLM_COUNTERS, 0.0)
    for line in metrics.splitlines():
        if (name := line.partition("{")[0]) in sums:
            sums[name] += float(line.rpartition(" ")[2])
    added = (
        f"# HELP {VLLM_COUNTERS[name]} Sum of {name}\n"
        f"# TYPE {VLLM_COUNTERS[name]} counter\n"
        f"{VLLM_COUNTERS[name]} {value:.0f}\n"
        for name, value in sums.items()
    )
    return metrics + "".join(added)


async def fetch_metrics(url: str) -> str:
    """Return Triton's metrics and vLLM's counters. Raises ApiError where Triton does not answer."""

    def fetch() -> str:
        with open_url(url, LIMIT_S) as response:
            text: str = response.read().decode()
            return with_vllm_counters(text)

    try:
        return await asyncio.to_thread(fetch)
    except (OSError, ValueError):
        raise ApiError(503, "Triton's metrics cannot be read") from None
