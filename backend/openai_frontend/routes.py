"""Each route's requests to Triton for a body: pure functions, which can run in any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from backend.limits import check_stop_words
from backend.openai_frontend.answers import RequestedTexts, tensors
from backend.openai_frontend.bodies import INT32, parse
from backend.openai_frontend.choices import CHAT, COMPLETION, Style
from backend.openai_frontend.errors import FIELDS, ApiError, upstream_error
from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.guides import guide_of
from backend.openai_frontend.schema import (
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from backend.openai_frontend.template import EscapedPrompt
from backend.request import RequestError

_KEPT = {"model", "n", "stream", "stream_options", "max_completion_tokens"}
"""Fields of a body that its answer reads."""
AnyBody = TypeVar("AnyBody", CompletionRequest, ChatRequest)
DEFAULT_MAX_TOKENS = 16
"""OpenAI's own for completions; chats go on to the end of the context."""


def completion_of(settings: FrontEnd, data: bytes, headers: Mapping[str, str]) -> RequestedTexts:
    """Return the answer to a body of ``/v1/completions``. Raises ApiError, as all of these do."""
    body = parse(data, headers, CompletionRequest)
    body.model = settings.check_model(body.model)
    _check_stop(body)
    for ids in (prompt for prompt in body.prompt if isinstance(prompt, list)):
        if len(ids) >= (context := settings.max_context_tokens):
            message = f"text_input of {len(ids)} tokens is over the limit of {context - 1}"
            raise upstream_error(400, message, FIELDS)
    silent = body.max_tokens == 0
    # the text model writes one token at least: it never sees a max_tokens of 0
    most = 1 if silent else body.max_tokens
    options = tensors(body, most, DEFAULT_MAX_TOKENS, echo=body.echo, top=body.logprobs)
    scored, special = body.logprobs is not None, settings.special_names
    style = Style(COMPLETION, scored, echo=body.echo, silent=silent, special=special)
    return RequestedTexts(
        _slim(body), style, body.prompt, options, settings.options.spec_decode_metrics
    )


def chat_of(settings: FrontEnd, data: bytes, headers: Mapping[str, str]) -> RequestedTexts:
    """Return the answer to a body of ``/v1/chat/completions``."""
    body = parse(data, headers, ChatRequest)
    body.model = settings.check_model(body.model)
    _check_stop(body)
    may_call = body.tool_choice is None or body.tool_choice.type != "none"
    tools, effort = body.tools if may_call else None, body.reasoning_effort
    prompt = settings.prompt(body.messages, tools, body.chat_template_kwargs, effort)
    top = (body.top_logprobs or 0) if body.logprobs else None
    options = tensors(body, body.max_completion_tokens or body.max_tokens, INT32, top=top)
    frame = settings.frame(prompt, splits=body.separate_reasoning)
    tool, guide = guide_of(body, frame, settings.special_tokens)
    options |= guide | {"add_special_tokens": False}  # the template writes all of them
    template = settings.template if tools and tool is None else None
    style = Style(
        CHAT,
        body.logprobs,
        tool,
        calls=None if template is None else template.calls,
        functions={each.function.name: each.function.parameters for each in tools or ()},
        parallel=body.parallel_tool_calls,
        frame=frame,
        shows_reasoning=body.include_reasoning,
        special=settings.special_names,
    )
    if settings.special_tokens.keys() & style.marks:
        options["skip_special_tokens"] = False
    return RequestedTexts(
        _slim(body), style, [prompt], options, settings.options.spec_decode_metrics
    )


def _check_stop(body: CompletionOptions) -> None:
    """Refuse here what the text model would refuse: a million words take long to send."""
    try:
        check_stop_words("stop", body.stop or [])
    except RequestError as error:
        raise ApiError(400, error.message, "stop") from None


def _slim(body: AnyBody) -> AnyBody:
    """Return a body without what has been rendered or is in the options."""
    fields = type(body).model_fields.keys() & _KEPT
    return type(body).model_construct(**{name: getattr(body, name) for name in fields})


def text_of(
    settings: FrontEnd, data: bytes, headers: Mapping[str, str]
) -> tuple[str | EscapedPrompt, bool | None]:
    """Return the text that a body of ``/tokenize`` is about, and whether it gets special tokens
    (None: as the deployment says).
    """
    body = parse(data, headers, TokenizeRequest)
    settings.check_model(body.model)
    if body.messages is None:
        return body.prompt or "", body.add_special_tokens
    prompt = settings.prompt(body.messages, body.tools, body.chat_template_kwargs)
    return prompt, False


def tokens_of(settings: FrontEnd, data: bytes, headers: Mapping[str, str]) -> list[int]:
    """Return the tokens that a body of ``/detokenize`` is about."""
    body = parse(data, headers, DetokenizeRequest)
    settings.check_model(body.model)
    return body.tokens
