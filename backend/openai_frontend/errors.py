"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from backend.openai_frontend.call_bodies import as_json

_EXPECTED = {
    "string": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "list": "an array",
    "dict": "an object",
    "model": "an object",
}
_BOUNDS = {
    "greater_than_equal": ">= {ge}",
    "greater_than": "> {gt}",
    "less_than_equal": "<= {le}",
    "less_than": "< {lt}",
}
_TYPE_ERRORS = ("_type", "_parsing", "_from_float")
_CODES = {401: "invalid_api_key", 405: "method_not_supported"}
_SCHEMA_LINE = re.compile(r": at (\d+)\(\d+\): failed to compile JSON schema: (.*)")
"""An error in a grammar of ``backend.openai_frontend.guides``: line n has the schema of tool n."""
_TOO_MANY = re.compile(r" (\d+) and a prompt of (\d+) tokens exceed the context of (\d+) tokens")
_TOO_LONG = re.compile(r" of (\d+) (tokens|bytes) is over the limit of (\d+)(?! bytes)\b")
"""The text model's errors about the context."""
RETRY_AFTER_S = 1
"""When a client may try again: a full queue has places before long. It waits longer by itself."""

FIELDS = {
    "text_input": "prompt",
    "prompt_token_ids": "prompt",
    "stop_words": "stop",
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
    "return_prompt_log_probs": "logprobs",
    "return_top_log_probs": "logprobs",
}
CHAT_FIELDS = {
    **FIELDS,
    "text_input": "messages",
    "prompt_token_ids": "messages",
    "guided_decoding_guide": "response_format",
}
TOOL_FIELDS = {**CHAT_FIELDS, "guided_decoding_guide": "tools"}
"""Tensors of the text model whose field has another name: of a completion, of a chat, of one that
must call a tool.
"""


class ApiError(Exception):
    """An answer other than the one asked for: an HTTP status, a sentence, the field that it is
    about, OpenAI's code.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(_printable(message))
        self.status = status
        self.param = None if param is None else _printable(param)
        self.code = code or _CODES.get(status)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes it."""
        return ApiError, (self.status, str(self), self.param, self.code)

    def body(self) -> dict[str, Any]:
        """Return what the client gets."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return it as a response with these headers."""
        retry = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        return JSONResponse(self.body(), self.status, {**(headers or {}), **retry})


def wrong(message: str, field: str = "", code: str = "invalid_value") -> PydanticCustomError:
    """Return the error of a validator; ``field`` where it is not the validator's own."""
    return PydanticCustomError(
        "wrong",
        "{message}",
        {"message": _printable(message), "field": _printable(field), "code": code},
    )


def upstream_error(status: int, message: str, names: Mapping[str, str]) -> ApiError:
    """Return what the text model answered; ``names`` are the fields of its tensors where these
    differ.
    """
    name = re.match(r"[a-z_]+", message)
    if status != 400 or name is None or (name[0] not in names and "_" not in name[0]):
        return ApiError(status, message)
    field = names.get(name[0], name[0])
    if field == "tools" and (at := _SCHEMA_LINE.search(message)) is not None:
        field = f"tools[{int(at[1]) - 1}].function.parameters"
        return ApiError(400, f"{field} is not a supported schema: {at[2]}", field)
    if field == "response_format" and (at := _SCHEMA_LINE.search(message)) is not None:
        return ApiError(400, f"{field} is no json_schema that can be served: {at[2]}", field)
    if (sentence := _context_exceeded(message, field, names)) is not None:
        return ApiError(status, sentence, field, "context_length_exceeded")
    return ApiError(status, field + message[name.end() :], field)


def _context_exceeded(message: str, field: str, names: Mapping[str, str]) -> str | None:
    """Return OpenAI's sentence, by which clients know the error, of the text model's own; None
    where that is another one.
    """
    prompt = names.get("text_input", "prompt")
    if match := _TOO_MANY.search(message):
        max_tokens, prompt_tokens, context = map(int, match.groups())
        return (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {prompt}, {max_tokens} "
            f"by {field}). Please reduce the length of the {prompt} or {field}."
        )
    if match := _TOO_LONG.search(message):
        size, unit, most = match.groups()
        verb = "have" if prompt == "messages" else "has"
        why = (
            "and at least one must be left for the completion"
            if unit == "tokens"
            else "which are too many for it"
        )
        return (
            f"This model's maximum context length is {int(most) + 1} tokens. However, the {prompt} "
            f"{verb} {size} {unit}, {why}. Please reduce the length of the {prompt}."
        )
    return None


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return what is wrong with a body, by pydantic's first error."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    place = list(error["loc"])
    if place[-1:] == ["[key]"]:  # the name before it has lost what is no text
        place[-2:] = [error["input"]]
    param = path_of([*place, context.get("field", "")]) or ""
    if kind == "wrong":
        message = context["message"]
        if context["code"] == "invalid_type":
            message = f"Invalid type for '{param}': {message}"
        return ApiError(400, message, param or None, context["code"])
    if kind == "missing":
        return ApiError(
            400, f"Missing required parameter: '{param}'", param, "missing_required_parameter"
        )
    return _invalid_value(kind, param, context, error)


def _invalid_value(
    kind: str, param: str, context: Mapping[str, Any], error: Mapping[str, Any]
) -> ApiError:
    """Return what is wrong with the value of a field."""
    value, code = as_json(error.get("input")), "invalid_value"
    expected = _EXPECTED.get(kind.partition("_")[0])
    if kind == "literal_error":
        message = (
            f"Invalid value for '{param}': {value}. Supported values are: {context['expected']}"
        )
    elif kind in _BOUNDS:
        bound = _BOUNDS[kind].format(**context)
        message = f"Invalid '{param}': expected a value {bound}, but got {value}"
    elif expected is not None and kind.endswith(_TYPE_ERRORS):
        message, code = (
            f"Invalid type for '{param}': expected {expected}, but got {value}",
            "invalid_type",
        )
    elif kind == "too_short":
        message = (
            f"Invalid '{param}': expected at least {context['min_length']} of them, but got {value}"
        )
    elif kind == "string_unicode":
        message = f"Invalid '{param}': a lone surrogate is not text, got {value}"
    elif kind == "string_pattern_mismatch":
        message = (
            f"Invalid '{param}': expected a string that matches {context['pattern']}, "
            f"but got {value}"
        )
    else:
        reason = error["msg"][:1].lower() + error["msg"][1:]
        message = f"Invalid '{param}': {reason}, but got {value}"
    return ApiError(400, message, param, code)


def handle_errors(app: FastAPI) -> None:
    """Have an application answer every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)  # its Allow is the answer
        if error.status_code in (404, 405):
            message = f"Invalid URL: {request.method} {request.url.path}"
        return ApiError(error.status_code, message).response(error.headers)


def path_of(parts: Sequence[Any]) -> str | None:
    """Return the place of an error as OpenAI writes it: ``messages[0].role``."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if part else ""
    return path.removeprefix(".") or None


def _printable(text: str) -> str:
    """Return a text with its lone surrogates, which no answer can have, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
