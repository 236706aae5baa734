"""Reads a request's body: JSON of one of the kinds in ``schema``, and a conversation in it with its
tools. A field that is unknown or not served is refused by name; null is no field.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from backend.openai_frontend.call_bodies import arguments_of, as_json
from backend.openai_frontend.errors import ApiError, invalid_body, path_of, wrong

INT32 = 2**31 - 1
IGNORED, REFUSED = "ignored", "refused"
CACHE_CONTROL = "prompts that begin alike share KV anyway (Anthropic's)"
MOST_LEVELS = 500
"""Arrays and objects inside each other; Python's own limit is about 900."""
_GZIP = b"\x1f\x8b"
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")
AnyBody = TypeVar("AnyBody", bound=BaseModel)


def ignore(does: str) -> Any:
    """Return a field that is accepted, whatever its value."""
    return Field(None, description=does, json_schema_extra={"fate": IGNORED}, exclude=True)


def refuse(why: str, *neutral: Any) -> Any:
    """Return a field that is refused, unless its value asks for nothing."""
    extra: dict[str, Any] = {"fate": REFUSED, "neutral": list(neutral)}
    return Field(None, description=why, json_schema_extra=extra)


class JsonObject(BaseModel):
    """A JSON object of named fields."""

    model_config = ConfigDict(extra="ignore")  # what is unknown is refused below, with a hint

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: Any) -> Any:
        """Refuse what is unknown or not served; leave out what is null."""
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name, value in body.items():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1, 0.75)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise wrong(f"Unknown parameter: '{name}'.{hint}", name, "unknown_parameter")
            extra = fields[name].json_schema_extra
            if isinstance(extra, dict) and extra["fate"] == REFUSED and value is not None:
                neutral = extra["neutral"]
                if not isinstance(neutral, list) or value not in neutral:
                    why = fields[name].description
                    message = f"Unsupported parameter: '{name}' is not supported: {why}"
                    raise wrong(message, name, "unsupported_parameter")
        return {name: value for name, value in body.items() if value is not None}


def one_of(value: Any, kind: type, name: str) -> Any:
    """Return a value that may also be a string. Raises where it is neither."""
    if not isinstance(value, kind):
        raise wrong(f"expected a string or {name}, but got {as_json(value)}", code="invalid_type")
    return value


def parse(data: bytes, headers: Mapping[str, str], kind: type[AnyBody]) -> AnyBody:
    """Return the body of a request with these headers. Raises ApiError."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = re.fullmatch(r"application/([\w.-]+\+)?json", media_type) is not None
    content = _decode(data, headers.get("content-encoding", "")) if data and is_json else None
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object, with Content-Type: application/json")
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None
    if _MAY_BE_SURROGATE.search(data):
        _refuse_surrogates({name: content[name] for name in content if not _is_ignored(kind, name)})
    return body


def _decode(data: bytes, encoding: str) -> Any:
    """Return the JSON value that a body is. Raises ApiError."""
    if encoding.lower() not in ("", "identity") or data.startswith(_GZIP):
        name = encoding or "gzip"
        raise ApiError(400, f"The body is compressed ({name}), which is unsupported: send it plain")
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {data[error.start]:#04x} at offset {error.start}"
        raise ApiError(400, f"The body is not JSON: it is not UTF-8, {byte}") from None
    except RecursionError:
        raise _nesting_error() from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise ApiError(400, f"The body has an integer of more than {most} digits") from None
    if data.count(b"[") + data.count(b"{") > MOST_LEVELS and _levels(value) > MOST_LEVELS:
        raise _nesting_error()
    return value


def _nesting_error() -> ApiError:
    return ApiError(400, f"The body is nested too deeply: more than {MOST_LEVELS} levels")


def _levels(value: Any) -> int:
    """Return how deeply arrays and objects are nested in a value."""
    level, count = [value], 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        level = [c for node in level for c in (node.values() if isinstance(node, dict) else node)]
        count += 1
    return count


def _is_ignored(kind: type[BaseModel], name: str) -> bool:
    field = kind.model_fields.get(name)
    extra = field.json_schema_extra if field is not None else None
    return isinstance(extra, dict) and extra.get("fate") == IGNORED


def _refuse_surrogates(value: Any) -> None:
    """Raise ApiError for half a surrogate pair, which is no text: an emoji that was cut in two."""
    for path, text in _texts(value, ()):
        if surrogate := _SURROGATE.search(text):
            param = path_of(path)
            message = (
                f"'{param}' has a lone surrogate, {surrogate[0]}, at character {surrogate.start()}"
            )
            raise ApiError(400, message, param, "invalid_value")


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the texts of a value, keys among them, and where they are."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name), name
            yield from _texts(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


class ContentPart(JsonObject):
    """A part of a message."""

    type: str
    text: str = ""
    refusal: str = ""
    cache_control: Any = ignore(CACHE_CONTROL)

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        kind = content.get("type") if isinstance(content, dict) else None
        if kind not in ("text", "refusal") or kind not in content:
            raise wrong(f"only content parts of type text are supported, got type {kind!r}", "type")
        return content


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return one_of(value, list, "an array of content parts")


def _arguments(value: Any) -> dict[str, Any] | str:
    """Return the arguments of an earlier call as chat templates take them: an object. A text that
    is no JSON, as an answer that was cut off has it, stays one, for templates that print it.
    """
    try:
        arguments = arguments_of(value)
    except RecursionError:
        arguments = None
    except ValueError:
        return str(value)
    if not isinstance(arguments, dict):
        raise wrong(f"expected a JSON object, but got {as_json(value)}", code="invalid_type")
    return arguments


class CalledFunction(JsonObject):
    """A function that was called, and its arguments: JSON, or the object itself."""

    name: str
    arguments: Annotated[dict[str, Any] | str, PlainValidator(_arguments)] = Field(
        default_factory=dict
    )


class ToolCall(JsonObject):
    """A call in a conversation."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = ignore("belongs to a streamed call")

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        return self.model_dump()


REASONING_NAMES = ("reasoning_content", "reasoning")
"""Names that templates have for the reasoning of an earlier answer."""


class ChatMessage(JsonObject):
    """A message of a chat. An assistant's may have null content with a refusal or calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="names the author; templates that know no `developer` see a `system` message"
    )
    content: Annotated[list[ContentPart], BeforeValidator(_parts)] | None = Field(
        None, description="is a text, or parts of type `text`, which are joined by line ends"
    )
    name: str | None = Field(None, description="is passed to the chat template")
    tool_calls: list[ToolCall] | None = Field(None, description="is passed to the chat template")
    tool_call_id: str | None = Field(None, description="is passed to the chat template")
    refusal: str | None = Field(
        None, description="is the text of an earlier answer if `content` is null"
    )
    reasoning_content: str | None = Field(
        None, description="belongs to an earlier answer; is passed to the chat template"
    )
    reasoning: str | None = Field(None, description="is the same under vLLM's name")
    annotations: Any = ignore("belongs to an earlier answer")
    cache_control: Any = ignore(CACHE_CONTROL)
    audio: Any = refuse("there is no audio")
    function_call: Any = refuse("use tool_calls")

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        others = (self.tool_calls, self.refusal, self.reasoning_content, self.reasoning)
        is_answer = self.role == "assistant" and any(other is not None for other in others)
        if self.content is None and not self.tool_calls and not is_answer:
            raise wrong("content must be a text or parts of type text, got null", "content")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        message = self.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message |= dict.fromkeys(REASONING_NAMES, reasoning)
            if not (self.tool_calls and self.content):  # gpt-oss's template refuses all three
                message["thinking"] = reasoning
        parts = [part.text + part.refusal for part in self.content or ()]
        joined = "\n".join(filter(None, parts))
        return {**message, "content": (self.refusal or "") if self.content is None else joined}


def first_broken_call(messages: Iterable[ChatMessage]) -> tuple[str, str] | None:
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


class JsonSchema(JsonObject):
    """The schema that a text must keep; ``strict`` closes its objects."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[Any, PlainValidator(_json_schema)] = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(JsonObject):
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


class Function(JsonObject):
    """A function that the model may call; ``parameters`` is the schema of its arguments, whose
    objects ``strict`` closes.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    cache_control: Any = ignore(CACHE_CONTROL)
    strict: bool | None = None


class Tool(JsonObject):
    """A function as a tool."""

    type: Literal["function"]
    function: Function
    cache_control: Any = ignore(CACHE_CONTROL)


class NamedFunction(JsonObject):
    """The name of a function."""

    name: str


class ToolChoice(JsonObject):
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


def _variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a template. Raises for one that no template can use."""
    for name, value in variables.items():
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
    return variables


Variables = Annotated[dict[str, Any], AfterValidator(_variables)]
