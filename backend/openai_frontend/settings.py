"""What the front end is started with, and what follows from it for every body."""

from __future__ import annotations

from dataclasses import dataclass

from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.schema import INT32, Message, Tool
from backend.openai_frontend.template import ChatTemplate

MIN_BODY_BYTES = 4 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 32
"""Bytes of the longest body: so many for each token of the context, at least the first."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Settings: where Triton's gRPC is, the model's public name, its chat template, and who may
    call ('': anyone; (): no site). ``most_texts`` of one body are generated at once.
    ``special_tokens`` are the names of the model's.
    """

    address: str
    model: str
    template: ChatTemplate | None = None
    api_key: str = ""
    origins: tuple[str, ...] = ()
    most_texts: int = 64
    max_context_tokens: int = INT32
    max_body_bytes: int = MIN_BODY_BYTES
    metrics_url: str = ""
    spec_decode_metrics: str = "summary"
    version: str = ""
    special_tokens: tuple[str, ...] = ()

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
