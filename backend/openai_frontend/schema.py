"""What the front end takes: OpenAI's request bodies. An unknown field is an error; a known one that is not served is refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_NOTHING: tuple[Any, ...] = (None, False, 0, {}, [], "none", "auto", {"type": "text"})


class StreamOptions(BaseModel):
    """``include_usage`` adds a last chunk with the token counts."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Options(BaseModel):
    """What both kinds of completion have. ``top_k``, ``repetition_penalty`` and ``min_tokens`` are this server's additions."""

    model_config = ConfigDict(extra="forbid")
    model: str
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: Any = None
    logit_bias: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> Options:
        """Refuse what is not served, and text that is not UTF-8."""
        for name, field in type(self).model_fields.items():
            if field.annotation is Any and getattr(self, name) not in _NOTHING:
                raise ValueError(f"{name} is not served")
        return self


class CompletionRequest(Options):
    """``POST /v1/completions``."""

    prompt: str | list[str]
    echo: bool = False
    suffix: Any = None
    best_of: Any = None


class Message(BaseModel):
    """One message of a chat. Its content is text, or parts of type ``text``."""

    model_config = ConfigDict(extra="forbid")
    role: str
    content: str | list[dict[str, str]]
    name: str | None = None

    def text(self) -> str:
        """Return the content as one text. Raises ValueError for a part that is none."""
        if isinstance(self.content, str):
            return self.content
        if any(part.get("type") != "text" or "text" not in part for part in self.content):
            raise ValueError("messages: only content parts of type text are served")
        return "".join(part["text"] for part in self.content)


class ChatRequest(Options):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    top_logprobs: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
