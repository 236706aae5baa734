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
    ChatMessage,
    JsonObject,
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


class StreamOptions(JsonObject):
    """How a stream ends."""

    include_usage: bool = Field(False, description="sends a last chunk with the token counts")
    include_obfuscation: Any = ignore("no padding is sent")
    continuous_usage_stats: Any = ignore("the counts come only with the last chunk (vLLM's)")


Bias = Annotated[float, Field(ge=-100, le=100)]


class CompletionOptions(JsonObject):
    """Both kinds of completion."""

    model: str = Field(description="names the model as `/v1/models` does")
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="limits the tokens in a text")
    temperature: float | None = Field(
        None, ge=0, le=2, description="divides the logits; 0: greedy; default: 1, as with OpenAI"
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="samples from the likeliest tokens up to this share; 0: only the likeliest",
    )
    n: int = Field(
        1,
        ge=1,
        le=128,
        description="sets the number of texts for every prompt; text i has the seed + i",
    )
    stop: Annotated[list[str], BeforeValidator(_stop)] | None = Field(
        None,
        description="ends the output before the first of one or several texts; if one contains "
        "the name of a special token, such as `<|im_end|>`, that token matches, too",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**64,
        description="repeats a text; default: random, reported in each choice",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="is subtracted once from the logits of tokens in the output; the prompt does "
        "not count",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="is subtracted from these logits once for each occurrence",
    )
    logit_bias: dict[Annotated[int, Field(ge=0, le=INT32)], Bias] | None = Field(
        None, description="adds -100 to 100 to the logit of each token id"
    )
    stream: bool = Field(False, description="sends server-sent events")
    stream_options: StreamOptions | None = Field(None, description="has `include_usage`")
    num_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="limits the tokens to guess in a step; 0: no speculation for this request "
        "(Spindle's)",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=INT32,
        description="samples from the k likeliest tokens; 0 or -1: off (vLLM's)",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="excludes tokens less likely than this share of the likeliest; 0: off (vLLM's)",
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32)]] | None = Field(
        None,
        description="ends the text at these tokens, which are not part of it, even with "
        "`ignore_eos` (vLLM's)",
    )
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="divides the logits of tokens in prompt and text, multiplies negative ones; "
        "1: off (vLLM's)",
    )
    min_tokens: int | None = Field(
        None, ge=0, le=INT32, description="bans end tokens before this many tokens (Spindle's)"
    )
    ignore_eos: bool = Field(False, description="continues the text after end tokens (vLLM's)")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        description="lets only requests with the same salt share KV, answers that drafts "
        "remember, and the policy's knowledge of texts (vLLM's)",
    )
    remember: bool = Field(
        True,
        description="false keeps drafts from remembering the answer for later requests (Spindle's)",
    )
    no_stop_trim: Any = refuse("a stop text is never part of the output (SGLang's)", False)
    skip_special_tokens: Any = refuse("special tokens are not text (vLLM's)", True)
    return_hidden_states: Any = refuse("hidden states are not returned (SGLang's)", False)
    user: Any = ignore("labels the caller")
    metadata: Any = ignore("labels the request for OpenAI's dashboard")
    store: Any = ignore("there is no interface to read answers back; see `remember`")
    service_tier: Any = ignore("all requests have the same tier")
    safety_identifier: Any = ignore("labels the caller")
    prompt_cache_key: Any = ignore("prompts that begin alike share KV anyway")
    prompt_cache_retention: Any = ignore("the least recently used KV is evicted first")
    cache_control: Any = ignore(CACHE_CONTROL)


class CompletionRequest(CompletionOptions):
    """``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)] = Field(
        description="contains a text, token ids, or an array of either"
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="limits the tokens in a text; default: 16, or the room that the prompt leaves "
        "in the context if that is less; 0 (with `echo`): only the prompt",
    )
    echo: bool = Field(
        False,
        description="puts the prompt before each text, and with `logprobs` also returns "
        "those of its tokens",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=5,
        description="returns log-probabilities, and this many of the likeliest tokens at each "
        "position",
    )
    resumed_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="says how many of the prompt's last token ids were generated before, by any "
        "server; the output continues as if it had not been interrupted (Spindle's)",
    )
    add_special_tokens: bool | None = Field(
        None,
        description="adds the tokenizer's special tokens, such as a begin token, to a prompt of "
        "text; default: as in `serving.json` (vLLM's)",
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


_VARIABLES = "sets variables of the chat template, such as `enable_thinking` (vLLM's)"


class ChatRequest(CompletionOptions):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        description="contains the conversation, which the model's chat template renders",
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=INT32,
        description="overrides `max_tokens`; default: the rest of the context",
    )
    logprobs: bool = Field(False, description="returns the log-probabilities of the tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="returns this many of the likeliest tokens at each position"
    )
    response_format: ResponseFormat | None = Field(
        None, description="is `text`, `json_object` or `json_schema`, enforced by a grammar"
    )
    tools: list[Tool] | None = Field(None, description="lists functions that the model may call")
    tool_choice: Annotated[ToolChoice, BeforeValidator(_tool_choice)] | None = Field(
        None,
        description="is `none`, `auto`, `required` or a function; a grammar enforces a required "
        "call",
    )
    parallel_tool_calls: bool = Field(
        True,
        description="false returns only the first call; a required call is always a single one",
    )
    chat_template_kwargs: Variables | None = Field(None, description=_VARIABLES)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None,
        description="is passed to chat templates that read it; `none` also sets `enable_thinking` "
        "and `thinking` to false if the template reads these",
    )
    separate_reasoning: bool = Field(
        True, description="false leaves reasoning in the content, as the model writes it (SGLang's)"
    )
    include_reasoning: bool = Field(
        True, description="false omits reasoning that is separate from the content (vLLM's)"
    )
    stream_reasoning: Any = refuse("reasoning is streamed as it is written (SGLang's)", True)
    continue_final_message: Any = refuse("answers are started, not continued (vLLM's)", False)
    add_special_tokens: Any = refuse("the chat template writes all of them (vLLM's)", False)
    prediction: Any = ignore("the policy decides how much to guess without it")
    functions: Any = refuse("use tools", [])
    function_call: Any = refuse("use tool_choice", "none")
    verbosity: Any = refuse("no model here reads it", "medium")
    modalities: Any = refuse("answers are text", ["text"])
    audio: Any = refuse("answers are text")
    web_search_options: Any = refuse("nothing is searched")

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        """Check what must be given together."""
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs needs logprobs true", "top_logprobs")
        names, wanted = [tool.function.name for tool in self.tools or ()], self.tool_choice
        if wanted is not None and wanted.type == "required" and not names:
            raise wrong("tool_choice required needs tools", "tool_choice")
        if wanted is not None and wanted.function is not None and wanted.function.name not in names:
            raise wrong(
                f"tool_choice: {wanted.function.name!r} is not among the tools {names}",
                "tool_choice",
            )
        return self


class TokenizeRequest(JsonObject):
    """``POST /tokenize``."""

    model: str | None = Field(None, description="names the model as `/v1/models` does; optional")
    prompt: str | None = Field(None, description="contains a text")
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, description="contains a conversation instead"
    )
    tools: list[Tool] | None = Field(
        None, description="is shown to the model with the conversation"
    )
    add_special_tokens: bool | None = Field(
        None,
        description="adds the tokenizer's special tokens to a prompt; default: as in "
        "`serving.json`; a conversation has only those of the chat template (vLLM's)",
    )
    continue_final_message: Any = refuse("answers are started, not continued (vLLM's)", False)
    chat_template_kwargs: Variables | None = Field(None, description=_VARIABLES)

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("either prompt or messages must be given", "prompt")
        if self.messages is not None and self.add_special_tokens:
            text = "add_special_tokens must not be true with messages: the chat template writes all"
            raise wrong(text, "add_special_tokens")
        return self


class DetokenizeRequest(JsonObject):
    """``POST /detokenize``."""

    model: str | None = Field(None, description="names the model as `/v1/models` does; optional")
    tokens: list[Annotated[int, Field(ge=0, le=INT32)]] = Field(description="contains token ids")
