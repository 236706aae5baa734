"""Bodies that the front end takes: OpenAI's request bodies, and of every field what becomes of it.

``docs/reference/openai.md`` has the fields as tables, written by
``docs.tools.reference``. An unknown field is an error, ``null`` is the same as no field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    model_validator,
)

from backend.openai_frontend.bodies import (
    CACHE_CONTROL,
    INT32,
    Body,
    Message,
    ResponseFormat,
    Tool,
    ToolChoice,
    Variables,
    ignore,
    one_of,
    refuse,
)
from backend.openai_frontend.errors import wrong

MOST_PROMPTS = 256


def _stop(value: Any) -> Any:
    return [value] if isinstance(value, str) else one_of(value, list, "an array of strings")


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


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = Field(False, description="a last chunk with the token counts")
    include_obfuscation: Any = ignore("no padding is sent")
    continuous_usage_stats: Any = ignore("vLLM's; the counts come with the last chunk only")


Bias = Annotated[float, Field(ge=-100, le=100)]


class Options(Body):
    """Both kinds of completion."""

    model: str = Field(description="the name that `/v1/models` has")
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="the most tokens of a text")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0: greedy; absent: 1, as OpenAI has it"
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of the likeliest tokens up to this share; 0: the likeliest alone",
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
        None,
        ge=-2,
        le=2,
        description="taken once from the logits of tokens that were written; the prompt does not "
        "count",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="taken from them once for each time that they were written",
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
        description="vLLM's: logits of tokens in prompt and text are divided by it, negative ones "
        "multiplied; 1: off",
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
    no_stop_trim: Any = refuse("SGLang's; a stop text is never part of the output", False)
    skip_special_tokens: Any = refuse("vLLM's; special tokens are no text", True)
    return_hidden_states: Any = refuse("SGLang's; hidden states are not returned", False)
    user: Any = ignore("labels the caller")
    metadata: Any = ignore("labels the request for OpenAI's dashboard")
    store: Any = ignore("there is no interface to read answers back; see `remember`")
    service_tier: Any = ignore("all requests are of one tier")
    safety_identifier: Any = ignore("labels the caller")
    prompt_cache_key: Any = ignore("prompts that begin alike share KV without it")
    prompt_cache_retention: Any = ignore("KV is kept by last use")
    cache_control: Any = ignore(CACHE_CONTROL)


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
    add_special_tokens: bool | None = Field(
        None,
        description="vLLM's: whether a prompt of text gets the tokenizer's special tokens, such as "
        "a begin token; absent: as `serving.json` says",
    )
    suffix: Any = refuse("text is only continued", "")
    best_of: Any = refuse("texts are not ranked", 1)

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens 0 needs echo true", "max_tokens")
        return self


def _tool_choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else one_of(value, dict, "an object")


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
    stream_reasoning: Any = refuse("SGLang's; reasoning is streamed as it is written", True)
    continue_final_message: Any = refuse("vLLM's; an answer is begun, not continued", False)
    add_special_tokens: Any = refuse("vLLM's; the chat template writes all of them", False)
    prediction: Any = ignore("how much is guessed is decided without it")
    functions: Any = refuse("use tools", [])
    function_call: Any = refuse("use tool_choice", "none")
    verbosity: Any = refuse("no model here takes how much to say", "medium")
    modalities: Any = refuse("answers are text", ["text"])
    audio: Any = refuse("answers are text")
    web_search_options: Any = refuse("nothing is searched")

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
                f"tool_choice: {wanted.function.name!r} is not among the tools {names}",
                "tool_choice",
            )
        return self

    def function_names(self) -> list[str]:
        """Return the names of the tools."""
        return [tool.function.name for tool in self.tools or ()]


class TokenizeRequest(Body):
    """``POST /tokenize``."""

    model: str | None = Field(None, description="the name that `/v1/models` has, if any")
    prompt: str | None = Field(None, description="a text")
    messages: list[Message] | None = Field(None, min_length=1, description="or a conversation")
    tools: list[Tool] | None = Field(None, description="shown to the model with the conversation")
    add_special_tokens: bool | None = Field(
        None,
        description="vLLM's: whether a prompt gets the tokenizer's special tokens; absent: as "
        "`serving.json` says; a conversation has those of the chat template alone",
    )
    continue_final_message: Any = refuse("vLLM's; an answer is begun, not continued", False)
    chat_template_kwargs: Variables | None = Field(None, description=_VARIABLES)

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("either prompt or messages must be given", "prompt")
        if self.messages is not None and self.add_special_tokens:
            text = "add_special_tokens must not be true with messages: the chat template writes all"
            raise wrong(text, "add_special_tokens")
        return self


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = Field(None, description="the name that `/v1/models` has, if any")
    tokens: list[Annotated[int, Field(ge=0, le=INT32)]] = Field(description="token ids")
