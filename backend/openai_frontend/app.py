"""The routes: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``; the status page ``/``, and what it reads."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from backend.openai_frontend.choices import CHAT, COMPLETION, Choice, Style, tool_schema
from backend.openai_frontend.hangup import until_gone
from backend.openai_frontend.schema import ChatRequest, CompletionRequest, Options, ToolChoice
from backend.openai_frontend.status import PAGE, PAGE_HEADERS, fetch_metrics
from backend.openai_frontend.template import ChatTemplate
from backend.openai_frontend.triton import Piece, Triton, UpstreamError

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own for completions."""
DEFAULT_CHAT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Settings: where Triton's gRPC is, the model's public name, its chat template, and who may call ('': anyone; (): no site)."""

    address: str
    model: str
    template: ChatTemplate | None = None
    api_key: str = ""
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    metrics_url: str = ""


def create_app(settings: FrontEnd) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.triton = Triton(settings.address)
        yield
        await app.state.triton.close()

    def authorise(request: Request) -> None:
        if request.url.path == "/":  # the page has no secrets; what it shows asks for the key
            return
        given = request.headers.get("authorization", "").encode()
        if settings.api_key and not hmac.compare_digest(given, f"Bearer {settings.api_key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    app = FastAPI(
        title="Spindle",
        lifespan=lifespan,
        max_body_size=settings.max_body_bytes,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(authorise)],
    )
    if settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    _handle_errors(app)
    _add_status(app, settings)
    _add_openai(app, settings)
    return app


def _add_status(app: FastAPI, settings: FrontEnd) -> None:
    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await fetch_metrics(settings.metrics_url))

    @app.get("/explain")
    async def explain(request: Request) -> dict[str, Any]:
        reply: dict[str, Any] = await request.app.state.triton.command("explain")
        return reply


def _add_openai(app: FastAPI, settings: FrontEnd) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": settings.model, "object": "model", "created": created, "owned_by": "spindle"}]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not prompts:
            raise HTTPException(400, "prompt must not be empty, got []")
        options = tensors(body, body.max_tokens or DEFAULT_MAX_TOKENS, echo=body.echo, top=body.logprobs)
        return await answer(request, body, Style(COMPLETION, body.logprobs is not None), prompts, options, settings.model)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        if settings.template is None:
            raise HTTPException(400, "the model has no chat template")
        try:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.tool_choice != "none" else None
            prompt = settings.template.prompt([message.as_dict() for message in body.messages], tools or None)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        top = (body.top_logprobs or 0) if body.logprobs else None
        options = tensors(body, body.max_completion_tokens or body.max_tokens or DEFAULT_CHAT_TOKENS, top=top)
        tool, schema = held_to(body)
        if schema is not None:
            options |= {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}
        return await answer(request, body, Style(CHAT, body.logprobs, tool), [prompt], options, settings.model)


def held_to(body: ChatRequest) -> tuple[str | None, Any]:
    """Return (the function that the text is a call of, '' for one that it names itself, or None; the JSON schema of the text or None)."""
    functions = {tool.function.name: tool.function.model_dump() for tool in body.tools or ()}
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        return name, functions[name]["parameters"] or {"type": "object"}
    if body.tool_choice == "required":
        return "", tool_schema(functions.values())
    if body.response_format is None or body.response_format.type == "text":
        return None, None
    asked = body.response_format.json_schema
    return None, {"type": "object"} if asked is None else asked.schema_


def tensors(body: Options, max_tokens: int, *, echo: bool = False, top: int | None = None) -> dict[str, Any]:
    """Return the inputs of the text model that a body's options mean. OpenAI's temperature is 1 unless given.

    ``top``: log-probabilities are wanted, and so many of the likeliest at each place.
    """
    names = ("top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
    options = {name: getattr(body, name) for name in names}
    options |= {
        "max_tokens": max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "seed": None if body.seed is None else body.seed % 2**64,
        "stop_words": [body.stop] if isinstance(body.stop, str) else body.stop or None,
        "num_return_sequences": body.n if body.n > 1 else None,
        "stream": body.stream,
        "exclude_input_in_output": not echo,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_log_probs": None if top is None else True,
        "return_top_log_probs": top,
    }
    return {name: value for name, value in options.items() if value is not None}


async def answer(request: Request, body: Options, style: Style, prompts: list[str], options: dict[str, Any], model: str) -> Response:
    """Ask Triton and return its answer, whole or as it comes. A client that hangs up ends its request."""
    if body.model != model:
        raise HTTPException(404, f"the model {body.model!r} does not exist; there is {model!r}")
    head = {"id": f"{style.kind.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
    pieces = request.app.state.triton.generate(prompts, options)
    if not body.stream:
        return await until_gone(request, whole(pieces, head, style, body.n, len(prompts)))
    first = await anext(pieces)  # what is wrong with a request has a status of its own
    echoed = prompts if "exclude_input_in_output" in options and not options["exclude_input_in_output"] else []
    usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(events(first, pieces, head, style, body.n, echoed, usage), media_type="text/event-stream")


async def whole(pieces: AsyncIterator[Piece], head: dict[str, Any], style: Style, n: int, prompts: int) -> Response:
    """Return the body of an answer that is not streamed."""
    choices, counts = [Choice(style, index) for index in range(n * prompts)], Counts()
    async for piece in pieces:
        choices[piece.prompt * n + piece.sequence].add(piece)
        counts.add(piece)
    made = [choice.whole() for choice in choices]
    return JSONResponse({**head, "object": style.kind.whole, "choices": made, "usage": counts.usage()})


async def events(
    first: Piece, pieces: Any, head: dict[str, Any], style: Style, n: int, echoed: list[str], with_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events; the pieces' stream is cancelled when nobody listens any more."""
    counts, choices = Counts(), defaultdict[int, Choice](lambda: Choice(style, 0))

    def event(made: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'object': style.kind.part, 'choices': made, **more}, ensure_ascii=False)}\n\n"

    async with aclosing(pieces):
        for index in range(len(echoed) * n):
            yield event([{"index": index, "text": echoed[index // n], "logprobs": None, "finish_reason": None}])
        piece: Piece | None = first
        try:
            while piece is not None:
                choice = choices[piece.prompt * n + piece.sequence]
                choice.index = piece.prompt * n + piece.sequence
                choice.add(piece)
                if (made := choice.part()) is not None:
                    yield event([made])
                counts.add(piece)
                piece = await anext(pieces, None)
        except UpstreamError as error:
            yield f"data: {json.dumps(error_body(error.status, str(error)))}\n\n"
            return
        if with_usage:
            yield event([], usage=counts.usage())
        yield "data: [DONE]\n\n"


class Counts:
    """Tokens of a request: a prompt counts once, however many texts continue it."""

    def __init__(self) -> None:
        self._inputs: dict[int, int] = {}
        self._output = 0

    def add(self, piece: Piece) -> None:
        """Count a piece."""
        if piece.finish_reason is not None:
            self._inputs[piece.prompt] = piece.input_tokens
            self._output += piece.output_tokens

    def usage(self) -> dict[str, int]:
        """Return OpenAI's ``usage``."""
        inputs = sum(self._inputs.values())
        return {"prompt_tokens": inputs, "completion_tokens": self._output, "total_tokens": inputs + self._output}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's form of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def error_response(status: int, message: str, param: str | None = None) -> Response:
    """Return an error as a response."""
    return JSONResponse(error_body(status, message, param), status)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return error_response(400, f"{param or 'body'}: {first['msg']}", param)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(UpstreamError)
    async def upstream(_: Request, error: UpstreamError) -> Response:
        return error_response(error.status, str(error))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return error_response(500, "internal error")
