"""Bodies that the front end takes: OpenAI's request bodies, and of every field what becomes of it.

``docs/reference/openai.md`` has the fields as tables, written by
``docs.tools.reference``. An unknown field is an error, ``null`` is the same as no field.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from backend.openai_frontend.errors import wrong
from backend.openai_frontend.literals import as_json

INT32 = 2**31 - 1
MOST_PROMPTS = 256
IGNORED, REFUSED = "ignored", "refused"


def _ignored(does: str) -> Any:
    """Return a field that is accepted, whatever its value."""
    return Field(None, description=does, json_schema_extra={"fate": IGNORED}, exclude=True)


def _refused(why: str, *neutral: Any) -> Any:
    """Return a field that is refused, unless its value asks for nothing."""
    extra: dict[str, Any] = {"fate": REFUSED, "neutral": list(neutral)}
    return Field(None, description=why, json_schema_extra=extra)


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="ignore"
    )  # what is unknown is refused below, with its likely name

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        """Refuse what is unknown or not served; leave out what is null."""
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name, value in given.items():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1, 0.75)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise wrong(f"Unknown parameter: '{name}'.{hint}", name, "unknown_parameter")
            extra = fields[name].json_schema_extra
            if isinstance(extra, dict) and extra["fate"] == REFUSED and value is not None:
                neutral = extra["neutral"]
                if not isinstance(neutral, list) or value not in neutral:
                    message = (
                        f"Unsupported parameter: '{name}' is not served: {fields[name].description}"
                    )
                    raise wrong(message, name, "unsupported_parameter")
        return {name: value for name, value in given.items() if value is not None}


def _stop(value: Any) -> Any:
    return [value] if isinstance(value, str) else _one_of(value, list, "an array of strings")


def _one_of(value: Any, kind: type, name: str) -> Any:
    """Return a value that may also be a string. Raises where it is neither."""
    if not isinstance(value, kind):
        raise wrong(f"expected a string or {name}, but got {as_json(value)}", code="invalid_type")
    return value


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise wrong(
            "prompt must be a string, an array of strings, of token ids, or of arrays of token ids"
        )
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        raise wrong(f"prompt must be 1 to {MOST_PROMPTS} prompts, got {len(prompts)}")
    return prompts


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token <= INT32 for token in value)
    )


_CACHE_CONTROL = "Anthropic's: prompts that begin alike share KV without it"


class StreamOptions(_Body):
    """How a stream ends."""

    include_usage: bool = Field(False, description="a last chunk with the token counts")
    include_obfuscation: Any = _ignored("no padding is sent")
    continuous_usage_stats: Any = _ignored("vLLM's; the counts come with the last chunk only")


Bias = Annotated[float, Field(ge=-100, le=100)]


class Options(_Body):
    """Both kinds of completion."""

    model: str = Field(description="the name that `/v1/models` has")
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="the most tokens of a text")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0: greedy; absent: 1, as OpenAI has it"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="of the likeliest tokens up to this share"
    )
    n: int = Field(1, ge=1, le=128, description="texts for every prompt; text i has the seed + i")
    stop: Annotated[list[str], BeforeValidator(_stop)] | None = Field(
        None,
        description="a text or several; the output ends before the first of them; the name of a "
        "special token in one of them, such as `<|im_end|>`, is that token, too",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**64,
        description="the same seed gives the same text; absent: a random one, named in each choice",
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken once from tokens that have occurred"
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken from them once for each occurrence"
    )
    logit_bias: dict[Annotated[int, Field(ge=0, le=INT32)], Bias] | None = Field(
        None, description="token id -> addend to its logit, -100 to 100"
    )
    stream: bool = Field(False, description="server-sent events")
    stream_options: StreamOptions | None = Field(None, description="`include_usage`")
    num_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="Spindle's: the most tokens to guess in a step; 0: no speculation for this "
        "request",
    )
    top_k: int | None = Field(
        None, ge=-1, le=INT32, description="vLLM's: of the k likeliest tokens; 0 or -1: off"
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="vLLM's: no token less likely than this share of the likeliest; 0: off",
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32)]] | None = Field(
        None,
        description="vLLM's: tokens that end the text and are no part of it, `ignore_eos` or not",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Spindle's: logits of tokens that have occurred are divided by it; 1: off",
    )
    min_tokens: int | None = Field(
        None, ge=0, le=INT32, description="Spindle's: no end token before this many tokens"
    )
    ignore_eos: bool = Field(False, description="vLLM's: no end token ends the text")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        description="vLLM's: only requests of the same salt share KV, what drafts remember and "
        "what the policy learns of texts",
    )
    remember: bool = Field(
        True,
        description="Spindle's; false: no draft remembers the answer for later requests",
    )
    no_stop_trim: Any = _refused("SGLang's; a stop text is never part of the output", False)
    skip_special_tokens: Any = _refused("vLLM's; special tokens are no text", True)
    return_hidden_states: Any = _refused("SGLang's; hidden states are not returned", False)
    user: Any = _ignored("labels the caller")
    metadata: Any = _ignored("labels the request for OpenAI's dashboard")
    store: Any = _ignored("there is no interface to read answers back; see `remember`")
    service_tier: Any = _ignored("all requests are of one tier")
    safety_identifier: Any = _ignored("labels the caller")
    prompt_cache_key: Any = _ignored("prompts that begin alike share KV without it")
    prompt_cache_retention: Any = _ignored("KV is kept by last use")
    cache_control: Any = _ignored(_CACHE_CONTROL)


class CompletionRequest(Options):
    """``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)] = Field(
        description="a text, token ids, or an array of either"
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="absent: 16, or what the prompt leaves of the context if that is less; 0 (with "
        "`echo`): the prompt alone",
    )
    echo: bool = Field(
        False, description="the prompt before each text; with `logprobs` those of its tokens, too"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=5,
        description="log-probabilities, and that many of the likeliest tokens at each place",
    )
    resumed_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="Spindle's: that many of the prompt's last token ids are text that was "
        "generated before, by any server; what follows is as if it had not been broken off",
    )
    suffix: Any = _refused("text is only continued", "")
    best_of: Any = _refused("texts are not ranked", 1)

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens 0 asks for nothing without echo", "max_tokens")
        return self


class ContentPart(_Body):
    """A part of a message."""

    type: str
    text: str = ""
    refusal: str = ""
    cache_control: Any = _ignored(_CACHE_CONTROL)

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
    return _one_of(value, list, "an array of content parts")


class CalledFunction(_Body):
    """A function that was called, and its arguments as JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(_Body):
    """A call in a conversation."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = _ignored("of a streamed call")

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat templates take it: its arguments as an object if they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


REASONING_NAMES = ("reasoning_content", "reasoning")
"""Names that templates have for the reasoning of an earlier answer."""


class Message(_Body):
    """A message of a chat. An assistant's may have null content with a refusal or calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="a `developer` message is a `system` message to templates that know no "
        "developers"
    )
    content: Annotated[list[ContentPart], BeforeValidator(_parts)] | None = Field(
        None, description="a text, or parts of type `text`"
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
    annotations: Any = _ignored("of an earlier answer")
    cache_control: Any = _ignored(_CACHE_CONTROL)
    audio: Any = _refused("there is no audio")
    function_call: Any = _refused("use tool_calls")

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
        parts = (part.text + part.refusal for part in self.content or ())
        return {
            **given,
            "content": (self.refusal or "") if self.content is None else "".join(parts),
        }


def _json_schema(value: Any) -> dict[str, Any] | bool:
    if not isinstance(value, (dict, bool)):
        raise wrong("a schema must be an object or a boolean")
    return value


class JsonSchema(_Body):
    """The schema that a text must keep; ``strict`` closes its objects."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[Any, PlainValidator(_json_schema)] = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
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


class Function(_Body):
    """A function that the model may call; ``parameters`` is the schema of its arguments, whose
    objects ``strict`` closes.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    cache_control: Any = _ignored(_CACHE_CONTROL)
    strict: bool | None = None


class Tool(_Body):
    """A function as a tool."""

    type: Literal["function"]
    function: Function
    cache_control: Any = _ignored(_CACHE_CONTROL)


class NamedFunction(_Body):
    """The name of a function."""

    name: str


class ToolChoice(_Body):
    """Whether the model has to call a function, and which."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _names_one(self) -> ToolChoice:
        if (self.function is None) == (self.type == "function"):
            raise wrong("function must be given with type function, and only with it", "function")
        return self


def _tool_choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else _one_of(value, dict, "an object")


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
_VARIABLES = "vLLM's: variables of the chat template, such as `enable_thinking`"


class ChatRequest(Options):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(
        min_length=1, description="the conversation, by the model's chat template"
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=INT32,
        description="goes before max_tokens; neither: as many as the context leaves",
    )
    logprobs: bool = Field(False, description="log-probabilities of the tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="that many of the likeliest tokens at each place"
    )
    response_format: ResponseFormat | None = Field(
        None, description="`text`, `json_object` or `json_schema`, enforced by a grammar"
    )
    tools: list[Tool] | None = Field(None, description="functions that the model may call")
    tool_choice: Annotated[ToolChoice, BeforeValidator(_tool_choice)] | None = Field(
        None,
        description="`none`, `auto`, `required` or a function; a grammar enforces a call that must "
        "come",
    )
    parallel_tool_calls: bool = Field(
        True,
        description="false: the first call alone is given; a call that must come is always one",
    )
    chat_template_kwargs: Variables | None = Field(None, description=_VARIABLES)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None,
        description="for chat templates that read it; `none` also sets `enable_thinking` and "
        "`thinking` to false where the template reads these",
    )
    separate_reasoning: bool = Field(
        True, description="SGLang's; false: reasoning stays in the content, as the model writes it"
    )
    include_reasoning: bool = Field(
        True, description="vLLM's; false: reasoning that is apart from the content is left out"
    )
    stream_reasoning: Any = _refused("SGLang's; reasoning is streamed as it is written", True)
    continue_final_message: Any = _refused("vLLM's; an answer is begun, not continued", False)
    prediction: Any = _ignored("how much is guessed is decided without it")
    functions: Any = _refused("use tools", [])
    function_call: Any = _refused("use tool_choice", "none")
    verbosity: Any = _refused("no model here takes how much to say", "medium")
    modalities: Any = _refused("answers are text", ["text"])
    audio: Any = _refused("answers are text")
    web_search_options: Any = _refused("nothing is searched")

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        """Check what must be given together."""
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs needs logprobs true", "top_logprobs")
        names, wanted = self.function_names(), self.tool_choice
        if wanted is not None and wanted.type == "required" and not names:
            raise wrong("tool_choice required needs tools", "tool_choice")
        if wanted is not None and wanted.function is not None and wanted.function.name not in names:
            raise wrong(
                f"tool_choice: {wanted.function.name!r} is none of the tools {names}", "tool_choice"
            )
        return self

    def function_names(self) -> list[str]:
        """Return the names of the tools."""
        return [tool.function.name for tool in self.tools or ()]


class TokenizeRequest(_Body):
    """``POST /tokenize``."""

    model: str | None = Field(None, description="the name that `/v1/models` has, if any")
    prompt: str | None = Field(None, description="a text")
    messages: list[Message] | None = Field(None, min_length=1, description="or a conversation")
    tools: list[Tool] | None = Field(None, description="shown to the model with the conversation")
    continue_final_message: Any = _refused("vLLM's; an answer is begun, not continued", False)
    chat_template_kwargs: Variables | None = Field(None, description=_VARIABLES)

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("either prompt or messages must be given", "prompt")
        return self


class DetokenizeRequest(_Body):
    """``POST /detokenize``."""

    model: str | None = Field(None, description="the name that `/v1/models` has, if any")
    tokens: list[Annotated[int, Field(ge=0, le=INT32)]] = Field(description="token ids")
