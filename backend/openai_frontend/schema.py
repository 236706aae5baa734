"""What the front end takes: OpenAI's request bodies. An unknown field is an error; a known one that is not served is refused by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_NOTHING: tuple[Any, ...] = (None, False, 0, {}, [], "none", "auto")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """``include_usage`` adds a last chunk with the token counts."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Options(_Body):
    """What both kinds of completion have. ``top_k``, ``repetition_penalty`` and ``min_tokens`` are this server's additions."""

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
    logit_bias: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> Options:
        """Refuse what is not served."""
        for name, field in type(self).model_fields.items():
            if field.annotation is Any and getattr(self, name) not in _NOTHING:
                raise ValueError(f"{name} is not served")
        return self


class CompletionRequest(Options):
    """``POST /v1/completions``."""

    prompt: str | list[str]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)
    suffix: Any = None
    best_of: Any = None

    @model_validator(mode="after")
    def _prompts_have_none(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs is not served with echo: a prompt has none")
        return self


class Message(_Body):
    """One message of a chat. Its content is text, or parts of type ``text``; one that calls tools may have none."""

    role: str
    content: str | list[dict[str, str]] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates take it. Raises ValueError for content that is no text."""
        given = self.model_dump(include={"role", "name", "tool_calls", "tool_call_id"}, exclude_none=True)
        return {**given, "content": self._text()}

    def _text(self) -> str:
        if self.content is None and not self.tool_calls:
            raise ValueError("messages: content must be text, got null")
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        if any(part.get("type") != "text" or "text" not in part for part in self.content):
            raise ValueError("messages: only content parts of type text are served")
        return "".join(part["text"] for part in self.content)


class JsonSchema(_Body):
    """The schema that a text must keep; ``strict`` changes nothing, it is kept to the letter."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """``text``, any JSON object, or one of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema must be given with type json_schema, and only with it")
        return self


class Function(_Body):
    """A function that the model may call; ``parameters`` is the schema of its arguments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A function as a tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    """The name of a function."""

    name: str


class ToolChoice(_Body):
    """The function that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Options):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        """Check what must be given together."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        names = [tool.function.name for tool in self.tools or ()]
        wanted = self.tool_choice
        if wanted == "required" and not names:
            raise ValueError("tool_choice required needs tools")
        if isinstance(wanted, ToolChoice) and wanted.function.name not in names:
            raise ValueError(f"tool_choice: {wanted.function.name!r} is none of the tools {names}")
        return self
