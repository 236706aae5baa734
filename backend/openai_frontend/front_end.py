"""The front end's start-up settings, and each route's requests to Triton for a body: pure
functions, which can run in any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from backend.config import OpenaiConfig
from backend.limits import check_stop_words
from backend.openai_frontend.access import Hosts, Keys
from backend.openai_frontend.answers import Answer, tensors
from backend.openai_frontend.bodies import INT32, parse
from backend.openai_frontend.choices import CHAT, COMPLETION, Style
from backend.openai_frontend.conversation import Message, Tool, first_broken_call
from backend.openai_frontend.errors import FIELDS, ApiError, upstream_error
from backend.openai_frontend.guides import guide_of
from backend.openai_frontend.reading import Channels, Frame, reasoning_after
from backend.openai_frontend.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Options,
    TokenizeRequest,
)
from backend.openai_frontend.template import ChatTemplate, Escaped, Escaper, RenderError
from backend.openai_frontend.texts import as_json
from backend.request import RequestError

MIN_BODY_BYTES = 4 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 32
"""The longest body: bytes for each token of the context, but never less than ``MIN_BODY_BYTES``."""
_KEPT = {"model", "n", "stream", "stream_options", "max_completion_tokens"}
"""Fields of a body that its answer reads."""
AnyBody = TypeVar("AnyBody", CompletionRequest, ChatRequest)
DEFAULT_MAX_TOKENS = 16
"""OpenAI's own for completions; chats go on to the end of the context."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """The front end's settings: the server that it asks, its model, and its callers."""

    address: str
    """Address of Triton's gRPC."""
    models: tuple[str, ...]
    """Public names of the model, the first in answers."""
    template: ChatTemplate | None = None
    options: OpenaiConfig = field(default_factory=OpenaiConfig)
    keys: Keys = field(default_factory=Keys)
    hosts: Hosts = field(default_factory=Hosts)
    most_texts: int = 64
    """Texts of one body that are generated at once."""
    max_context_tokens: int = INT32
    max_body_bytes: int = MIN_BODY_BYTES
    metrics_url: str = ""
    version: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """The model's special tokens: ids by name."""
    admin_secret: str = ""
    """The secret that administrative commands need."""

    def check_model(self, name: str | None) -> str:
        """Return the name of the model that answers have. Raises ApiError for another model's."""
        if name is not None and name not in self.models:
            there = " and ".join(map(repr, self.models))
            message = f"The model {name!r} does not exist; there is {there}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.models[0]

    def prompt(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        variables: Mapping[str, Any] | None = None,
        effort: str | None = None,
    ) -> str | Escaped:
        """Return the prompt of a conversation by the template, its ``variables`` and the
        ``reasoning_effort``. Raises ApiError.
        """
        if self.template is None:
            raise ApiError(400, "the model has no chat template", "messages")
        shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        given = [message.as_dict() for message in messages]
        escaper = Escaper(self.special_tokens) if self.options.escape_special_tokens else None
        try:
            given = escaper.messages(given) if escaper else given
            named = {**self.template.variables(effort), **(variables or {})}
            text = self.template.prompt(given, shown or None, named)
        except RenderError as error:
            if error.field == "messages" and (broken := first_broken_call(messages)) is not None:
                field, value = broken
                message = f"{field}: expected a JSON object, but got {as_json(value)}; {error}"
                raise ApiError(400, message, field, "invalid_value") from None
            raise ApiError(400, str(error), error.field, error.code) from None
        except RecursionError:
            raise ApiError(400, "messages are nested too deeply", "messages") from None
        return escaper.prompt(text) if escaper else text

    def frame(self, prompt: str | Escaped, *, splits: bool) -> Frame | None:
        """Return what is around the content of the answer to a conversation; ``splits``: the
        client wants reasoning apart from the content.
        """
        splits = splits and self.options.split_reasoning
        if self.template is not None and self.template.has_channels:
            return Channels(splits)
        if self.template is None or not splits:
            return None
        text = prompt.text if isinstance(prompt, Escaped) else prompt
        return reasoning_after(self.template.reasoning, text)


def completion_of(settings: FrontEnd, data: bytes, headers: Mapping[str, str]) -> Answer:
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
    special = frozenset(name.encode() for name in settings.special_tokens)
    scored = body.logprobs is not None
    style = Style(COMPLETION, scored, echo=body.echo, silent=silent, special=special)
    return Answer(_slim(body), style, body.prompt, options, settings.options.spec_decode_metrics)


def chat_of(settings: FrontEnd, data: bytes, headers: Mapping[str, str]) -> Answer:
    """Return the answer to a body of ``/v1/chat/completions``."""
    body = parse(data, headers, ChatRequest)
    body.model = settings.check_model(body.model)
    _check_stop(body)
    called = body.tool_choice is None or body.tool_choice.type != "none"
    tools, effort = body.tools if called else None, body.reasoning_effort
    prompt = settings.prompt(body.messages, tools, body.chat_template_kwargs, effort)
    top = (body.top_logprobs or 0) if body.logprobs else None
    options = tensors(body, body.max_completion_tokens or body.max_tokens, INT32, top=top)
    frame = settings.frame(prompt, splits=body.separate_reasoning)
    tool, guide = guide_of(body, frame, settings.special_tokens)
    options |= guide | {"add_special_tokens": False}  # the template writes all of them
    special = frozenset(name.encode() for name in settings.special_tokens)
    parallel = body.parallel_tool_calls
    style = Style(
        CHAT,
        body.logprobs,
        tool,
        parallel=parallel,
        frame=frame,
        shows_reasoning=body.include_reasoning,
        special=special,
    )
    if body.tools and called:
        style = replace(
            style, functions={t.function.name: t.function.parameters for t in body.tools}
        )
        if tool is None and settings.template is not None:
            style = replace(style, calls=settings.template.calls)
    if settings.special_tokens.keys() & style.marks:
        options["skip_special_tokens"] = False
    return Answer(_slim(body), style, [prompt], options, settings.options.spec_decode_metrics)


def _check_stop(body: Options) -> None:
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
) -> tuple[str | Escaped, bool | None]:
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
