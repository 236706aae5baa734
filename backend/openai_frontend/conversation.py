"""A conversation as a body has it: messages, tools, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from backend.openai_frontend.bodies import CACHE_CONTROL, Body, ignored, one_of, refused
from backend.openai_frontend.errors import wrong
from backend.openai_frontend.texts import arguments_of, as_json


class ContentPart(Body):
    """A part of a message."""

    type: str
    text: str = ""
    refusal: str = ""
    cache_control: Any = ignored(CACHE_CONTROL)

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in ("text", "refusal") or kind not in given:
            raise wrong(f"only content parts of type text are served, got type {kind!r}", "type")
        return given


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return one_of(value, list, "an array of content parts")


def _arguments(value: Any) -> dict[str, Any] | str:
    """Return the arguments of an earlier call as chat templates take them: an object. A text that
    is no JSON, as an answer that was cut off has it, stays one, for templates that print it.
    """
    try:
        made = arguments_of(value)
    except RecursionError:
        made = None
    except ValueError:
        return str(value)
    if not isinstance(made, dict):
        raise wrong(f"expected a JSON object, but got {as_json(value)}", code="invalid_type")
    return made


class CalledFunction(Body):
    """A function that was called, and its arguments: JSON, or the object itself."""

    name: str
    arguments: Annotated[dict[str, Any] | str, PlainValidator(_arguments)] = Field(
        default_factory=dict
    )


class ToolCall(Body):
    """A call in a conversation."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = ignored("of a streamed call")

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        return self.model_dump()


REASONING_NAMES = ("reasoning_content", "reasoning")
"""Names that templates have for the reasoning of an earlier answer."""


class Message(Body):
    """A message of a chat. An assistant's may have null content with a refusal or calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="a `developer` message is a `system` message to templates that know no "
        "developers"
    )
    content: Annotated[list[ContentPart], BeforeValidator(_parts)] | None = Field(
        None, description="a text, or parts of type `text`, which are joined by line ends"
    )
    name: str | None = Field(None, description="for the chat template")
    tool_calls: list[ToolCall] | None = Field(None, description="for the chat template")
    tool_call_id: str | None = Field(None, description="for the chat template")
    refusal: str | None = Field(
        None, description="of an earlier answer: its text where content is null"
    )
    reasoning_content: str | None = Field(
        None, description="of an earlier answer, for the chat template"
    )
    reasoning: str | None = Field(None, description="the same by vLLM's name")
    annotations: Any = ignored("of an earlier answer")
    cache_control: Any = ignored(CACHE_CONTROL)
    audio: Any = refused("there is no audio")
    function_call: Any = refused("use tool_calls")

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        others = (self.tool_calls, self.refusal, self.reasoning_content, self.reasoning)
        is_answer = self.role == "assistant" and any(other is not None for other in others)
        if self.content is None and not self.tool_calls and not is_answer:
            raise wrong("content must be a text or parts of type text, got null", "content")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        given = self.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
        if self.tool_calls:
            given["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            given |= dict.fromkeys(REASONING_NAMES, reasoning)
            if not (self.tool_calls and self.content):  # gpt-oss's template refuses all three
                given["thinking"] = reasoning
        parts = [part.text + part.refusal for part in self.content or ()]
        joined = "\n".join(filter(None, parts))
        return {**given, "content": (self.refusal or "") if self.content is None else joined}


def first_broken_call(messages: Iterable[Message]) -> tuple[str, str] | None:
    """Return the path and the value of the first arguments that are no JSON, None without any."""
    return next(
        (
            (f"messages[{at}].tool_calls[{index}].function.arguments", call.function.arguments)
            for at, message in enumerate(messages)
            for index, call in enumerate(message.tool_calls or ())
            if isinstance(call.function.arguments, str)
        ),
        None,
    )


def _json_schema(value: Any) -> dict[str, Any] | bool:
    if not isinstance(value, (dict, bool)):
        raise wrong("a schema must be an object or a boolean")
    return value


class JsonSchema(Body):
    """The schema that a text must keep; ``strict`` closes its objects."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[Any, PlainValidator(_json_schema)] = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """``text``, any JSON object, or one of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise wrong(
                "json_schema must be given with type json_schema, and only with it", "json_schema"
            )
        return self


class Function(Body):
    """A function that the model may call; ``parameters`` is the schema of its arguments, whose
    objects ``strict`` closes.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    cache_control: Any = ignored(CACHE_CONTROL)
    strict: bool | None = None


class Tool(Body):
    """A function as a tool."""

    type: Literal["function"]
    function: Function
    cache_control: Any = ignored(CACHE_CONTROL)


class NamedFunction(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """Whether the model has to call a function, and which."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _names_one(self) -> ToolChoice:
        if (self.function is None) == (self.type == "function"):
            raise wrong("function must be given with type function, and only with it", "function")
        return self


_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "chat_template",
    "tokenize",
)
"""Variables of a template, and arguments of its rendering, that no client sets."""
_VARIABLE_TYPES: dict[str, tuple[type, str]] = {
    "enable_thinking": (bool, "true or false"),
    "thinking": (bool, "true or false"),
    "reasoning_effort": (str, "a string"),
}
"""Values of variables in the templates that read them: "false" would switch reasoning on."""


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a template. Raises for one that no template can use."""
    for name, value in given.items():
        kind, expected = _VARIABLE_TYPES.get(name, (object, ""))
        path = f"chat_template_kwargs.{name}"
        if name in _RESERVED:
            raise wrong(f"'{path}' is set by the server, got {as_json(value)}", name)
        if not isinstance(value, kind):
            message = f"Invalid type for '{path}': expected {expected}, but got {as_json(value)}"
            raise wrong(message, name)
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            message = f"Invalid value for '{path}': numbers must be finite, got {as_json(value)}"
            raise wrong(message, name) from None
    return given


Variables = Annotated[dict[str, Any], AfterValidator(_variables)]
