"""A request's options in vLLM's words, or their refusal by name (``contract`` has the table)."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from backend.engines.hosted import Ask
from backend.request import ErrorCode, RequestError

MOST_TEMPERATURE = MOST_PENALTY = 2.0
"""Values beyond which vLLM takes none."""
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}


def sampling_params(ask: Ask, *, speculates: bool, eos: int | None) -> SamplingParams:
    """Return what vLLM is asked for; ``eos`` is the model's own end token. Stop words and text are
    the session's: vLLM gets end tokens and a length only. Raises RequestError.
    """
    check(ask, speculates=speculates, eos=eos)
    asked = ask.sampling
    wants_log_probs = asked.log_probs or asked.top_log_probs is not None
    truncation: dict[str, Any] = {}
    if not asked.greedy:
        truncation = {"top_k": asked.top_k, "top_p": asked.top_p, "min_p": asked.min_p}
    params = SamplingParams(
        temperature=0.0 if asked.greedy else asked.temperature,
        **truncation,
        seed=None if asked.greedy else asked.seed & _SEED_BITS,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        stop_token_ids=list(asked.end_ids),
        ignore_eos=True,  # the request's end ids count, whatever the model's are
        max_tokens=ask.max_tokens,
        min_tokens=min(asked.min_tokens, ask.max_tokens) if asked.end_ids else 0,
        logprobs=(asked.top_log_probs or 0) if wants_log_probs else None,
        logit_bias=dict(asked.bias) or None,
        structured_outputs=None if ask.guide is None else _guide(*ask.guide),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"spindle": {"most_drafted": ask.most_drafted, "control": ask.control}},
        skip_clone=True,
    )
    if asked.bad_words:
        params._bad_words_token_ids = [list(word) for word in asked.bad_words]
    return params


_SEED_BITS = 2**63 - 1
"""The bits of a seed that vLLM takes."""


def check(ask: Ask, *, speculates: bool, eos: int | None) -> None:
    """Raise RequestError for an option that vLLM has not, or that means something else there."""
    asked = ask.sampling
    sampled = not asked.greedy
    if speculates and asked.min_p and sampled:
        raise _refusal("min_p", "vLLM has none where it speculates", asked.min_p)
    if speculates and asked.bias:
        raise _refusal("embedding_bias", "vLLM has none where it speculates")
    if sampled and asked.temperature > MOST_TEMPERATURE:
        raise _refusal("temperature", f"vLLM's is at most {MOST_TEMPERATURE:g}", asked.temperature)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(asked, name)
        if abs(value) > MOST_PENALTY:
            between = f"vLLM's is between -{MOST_PENALTY:g} and {MOST_PENALTY:g}"
            raise _refusal(name, between, value)
        if value and asked.prompt_ignore_length < ask.prompt_tokens:
            reason = (
                f"vLLM counts the output alone: prompt_ignore_length must be at least the "
                f"prompt's {ask.prompt_tokens} tokens, it is {asked.prompt_ignore_length}"
            )
            raise _refusal(name, reason, value)
    is_cut = asked.top_k > 0 or asked.top_p < 1.0 or asked.min_p > 0.0
    if sampled and is_cut and (asked.log_probs or asked.top_log_probs is not None):
        name = "return_log_probs" if asked.log_probs else "return_top_log_probs"
        raise _refusal(name, "with top_k, top_p or min_p vLLM computes them after those")
    if len(ask.tokens) > ask.prompt_tokens and (
        asked.presence_penalty or asked.frequency_penalty or asked.min_tokens or ask.guide
    ):
        reason = "with penalties, min_tokens or a grammar vLLM takes them as prompt"
        raise _refusal("resumed_tokens", reason, len(ask.tokens) - ask.prompt_tokens)
    if asked.min_tokens and asked.end_ids and eos not in asked.end_ids:
        reason = f"vLLM bans the model's own end token, {eos}, too, which must be an end id"
        raise _refusal("min_tokens", reason, asked.min_tokens)
    if ask.guide is not None and eos not in asked.end_ids:
        reason = f"vLLM's grammars end with the model's own end token, {eos}, which must end it"
        raise _refusal("guided_decoding_guide", reason)


def _guide(kind: str, text: str) -> StructuredOutputsParams:
    if kind == "json":
        return StructuredOutputsParams(json_object=True)
    if kind == "ebnf_grammar":
        from llguidance.gbnf_to_lark import any_to_lark

        text = any_to_lark(text)
    return StructuredOutputsParams(**{_GUIDES[kind]: text})


def _refusal(name: str, reason: str, value: float | None = None) -> RequestError:
    got = "" if value is None else f", got {value:g}"
    return RequestError(ErrorCode.UNIMPLEMENTED, f"{name} is not supported: {reason}{got}")
