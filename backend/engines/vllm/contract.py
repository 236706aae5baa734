"""The meaning of each request option where vLLM is the target, in one table: for those who refuse,
for the docs, and for tests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from backend.engines.hosted import HostedRequest
from backend.request import ErrorCode, RequestError

MOST_TEMPERATURE = MOST_PENALTY = 2.0
"""Values beyond which vLLM takes none."""


class Meaning(Enum):
    """How an option compares with the same one on Spindle's own engines."""

    SAME = "same"
    OTHER = "other"
    REFUSED = "refused"


class Rule(NamedTuple):
    """An option, or some of one kind, by the names of ``backend.request.GenerationRequest``."""

    options: tuple[str, ...]
    meaning: Meaning
    note: str = ""
    """Why it is refused, how it differs, or when it is refused although it is the same."""


_PENALTY = (
    "refused if it would count the prompt: vLLM counts only the output, as prompt_ignore_length "
    "requests if it is as long as the prompt and OpenAI's routes always do; refused if over 2 "
    "or under -2 after multiplication by the temperature, and with resumed_tokens"
)

ROWS = (
    Rule(("text_input", "input_ids", "prompt_token_ids", "add_special_tokens"), Meaning.SAME),
    Rule(("max_tokens", "fit_max_tokens", "stream"), Meaning.SAME),
    Rule(("exclude_input_in_output", "skip_special_tokens"), Meaning.SAME),
    Rule(("pad_id", "timeout_s"), Meaning.SAME),
    Rule(("end_id", "stop_token_ids"), Meaning.SAME),
    Rule(("stop_words", "stop_word_ids"), Meaning.SAME),
    Rule(("temperature",), Meaning.SAME, "refused over 2"),
    Rule(("top_k", "top_p"), Meaning.SAME),
    Rule(("min_p",), Meaning.SAME, "refused with a drafter"),
    Rule(
        ("seed",),
        Meaning.OTHER,
        "vLLM draws, so a seed gives another text than on Spindle's engines, and repeats it only "
        "if vLLM's logits do not depend on the other requests in the batch",
    ),
    Rule(
        ("min_tokens",),
        Meaning.SAME,
        "refused with resumed_tokens, and if the model's own end token does not end the text",
    ),
    Rule(("repetition_penalty",), Meaning.SAME),
    Rule(("presence_penalty", "frequency_penalty"), Meaning.SAME, _PENALTY),
    Rule(("prompt_ignore_length",), Meaning.SAME, "refused if it is shorter than the prompt"),
    Rule(("bad_words", "bad_word_ids"), Meaning.SAME),
    Rule(
        ("bias", "embedding_bias_words", "embedding_bias_weights"),
        Meaning.SAME,
        "refused with a drafter",
    ),
    Rule(
        ("return_log_probs", "top_log_probs"),
        Meaning.SAME,
        "refused for a sampled request with top_k, top_p or min_p: vLLM computes "
        "log-probabilities after these",
    ),
    Rule(
        ("return_context_logits", "return_generation_logits"), Meaning.REFUSED, "vLLM returns none"
    ),
    Rule(("return_prompt_log_probs",), Meaning.REFUSED, "Spindle does not pass vLLM's on"),
    Rule(
        ("top_p_decay", "top_p_min", "top_p_reset_id"), Meaning.REFUSED, "vLLM has no such option"
    ),
    Rule(
        ("guide_type", "guide"),
        Meaning.OTHER,
        "vLLM's own llguidance applies the grammar, with its rules for blanks; refused if the "
        "model's own end token does not end the text, and with resumed_tokens",
    ),
    Rule(
        ("num_draft_tokens",),
        Meaning.SAME,
    ),
    Rule(
        ("resumed_tokens",),
        Meaning.SAME,
        "refused with penalties, min_tokens and grammars, because vLLM would treat these tokens "
        "as prompt",
    ),
    Rule(("cache_salt",), Meaning.SAME),
    Rule(("remember",), Meaning.OTHER, "has no effect: vLLM's drafters do not remember answers"),
)

REFUSES = {
    name: row.note
    for row in ROWS
    if row.meaning is Meaning.REFUSED
    for name in row.options
    if name not in ("top_p_min", "top_p_reset_id")  # they do nothing without top_p_decay
}
"""Reasons by option, as ``backend.core.preparation.check_served`` reads them."""


def check(ask: HostedRequest, *, speculates: bool, eos: int | None) -> None:
    """Raise RequestError for an option that vLLM has not, or that means something else there."""
    sampling = ask.sampling
    sampled = not sampling.greedy
    if speculates and sampling.min_p and sampled:
        raise _refusal("min_p", "vLLM does not support it with a drafter", sampling.min_p)
    if speculates and sampling.bias:
        raise _refusal("embedding_bias", "vLLM does not support it with a drafter")
    if sampled and sampling.temperature > MOST_TEMPERATURE:
        raise _refusal(
            "temperature", f"vLLM's is at most {MOST_TEMPERATURE:g}", sampling.temperature
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = penalty(ask, name)
        if abs(value) > MOST_PENALTY:
            between = f"times the temperature it must be between -{MOST_PENALTY:g} and "
            raise _refusal(name, f"{between}{MOST_PENALTY:g} for vLLM", value)
        if value and sampling.prompt_ignore_length < ask.prompt_tokens:
            reason = (
                f"vLLM counts the output alone: prompt_ignore_length must be at least the "
                f"prompt's {ask.prompt_tokens} tokens, it is {sampling.prompt_ignore_length}"
            )
            raise _refusal(name, reason, value)
    is_cut = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if sampled and is_cut and (sampling.log_probs or sampling.top_log_probs is not None):
        name = "return_log_probs" if sampling.log_probs else "return_top_log_probs"
        raise _refusal(name, "with top_k, top_p or min_p vLLM computes them after those")
    if len(ask.tokens) > ask.prompt_tokens and (
        sampling.presence_penalty or sampling.frequency_penalty or sampling.min_tokens or ask.guide
    ):
        reason = "with penalties, min_tokens or a grammar vLLM takes them as prompt"
        raise _refusal("resumed_tokens", reason, len(ask.tokens) - ask.prompt_tokens)
    if sampling.min_tokens and sampling.end_ids and eos not in sampling.end_ids:
        reason = f"vLLM bans the model's own end token, {eos}, too, which must be an end id"
        raise _refusal("min_tokens", reason, sampling.min_tokens)
    if ask.guide is not None and eos not in sampling.end_ids:
        reason = f"vLLM's grammars end with the model's own end token, {eos}, which must end it"
        raise _refusal("guided_decoding_guide", reason)


def penalty(ask: HostedRequest, name: str) -> float:
    """Return vLLM's value of a penalty: it is taken from the logits before they are divided by the
    temperature, ours after that.
    """
    sampling = ask.sampling
    value: float = getattr(sampling, name)
    return value if sampling.greedy else value * sampling.temperature


def _refusal(name: str, reason: str, value: float | None = None) -> RequestError:
    got = "" if value is None else f", got {value:g}"
    return RequestError(ErrorCode.UNIMPLEMENTED, f"{name} is not supported: {reason}{got}")
