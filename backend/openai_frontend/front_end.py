"""The front end's start-up settings, and what follows from them for every body.

A process that waits for its first body imports this, and not yet the routes (20 MiB).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.config import OpenaiConfig
from backend.openai_frontend.access import Hosts, Keys
from backend.openai_frontend.bodies import INT32, ChatMessage, Tool, first_broken_call
from backend.openai_frontend.call_bodies import as_json
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.reading import Channels, Frame, reasoning_after
from backend.openai_frontend.template import ChatTemplate, EscapedPrompt, Escaper, RenderError

MIN_BODY_BYTES = 4 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 32
"""The longest body: bytes for each token of the context, but never less than ``MIN_BODY_BYTES``."""


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

    @property
    def special_names(self) -> frozenset[bytes]:
        """The names of the special tokens, as pieces of a text have them."""
        return frozenset(name.encode() for name in self.special_tokens)

    def check_model(self, name: str | None) -> str:
        """Return the name of the model that answers have. Raises ApiError for another model's."""
        if name is not None and name not in self.models:
            there = " and ".join(map(repr, self.models))
            message = f"The model {name!r} does not exist; there is {there}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.models[0]

    def prompt(
        self,
        messages: list[ChatMessage],
        tools: list[Tool] | None,
        variables: Mapping[str, Any] | None = None,
        effort: str | None = None,
    ) -> str | EscapedPrompt:
        """Return the prompt of a conversation by the template, its ``variables`` and the
        ``reasoning_effort``. Raises ApiError.
        """
        if self.template is None:
            raise ApiError(400, "the model has no chat template", "messages")
        tool_schemas = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        chat = [message.as_dict() for message in messages]
        escaper = Escaper(self.special_tokens) if self.options.escape_special_tokens else None
        try:
            chat = escaper.messages(chat) if escaper else chat
            named = {**self.template.variables(effort), **(variables or {})}
            text = self.template.prompt(chat, tool_schemas or None, named)
        except RenderError as error:
            if error.field == "messages" and (broken := first_broken_call(messages)) is not None:
                field, value = broken
                message = f"{field}: expected a JSON object, but got {as_json(value)}; {error}"
                raise ApiError(400, message, field, "invalid_value") from None
            raise ApiError(400, str(error), error.field, error.code) from None
        except RecursionError:
            raise ApiError(400, "messages are nested too deeply", "messages") from None
        return escaper.prompt(text) if escaper else text

    def frame(self, prompt: str | EscapedPrompt, *, splits: bool) -> Frame | None:
        """Return what is around the content of the answer to a conversation; ``splits``: the
        client wants reasoning apart from the content.
        """
        splits = splits and self.options.split_reasoning
        if self.template is not None and self.template.has_channels:
            return Channels(splits)
        if self.template is None or not splits:
            return None
        text = prompt.text if isinstance(prompt, EscapedPrompt) else prompt
        return reasoning_after(self.template.reasoning, text)
