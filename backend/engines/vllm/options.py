"""A request's options in vLLM's words (``contract`` has the table)."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from backend.engines.hosted import HostedRequest
from backend.engines.vllm.contract import check, penalty

_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}


def sampling_params(ask: HostedRequest, *, speculates: bool, eos: int | None) -> SamplingParams:
    """Return what vLLM is asked for; ``eos`` is the model's own end token. Stop words and text are
    the session's: vLLM gets end tokens and a length only. Raises RequestError.
    """
    check(ask, speculates=speculates, eos=eos)
    sampling = ask.sampling
    wants_log_probs = sampling.log_probs or sampling.top_log_probs is not None
    truncation: dict[str, Any] = {}
    if not sampling.greedy:
        truncation = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    params = SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        **truncation,
        seed=None if sampling.greedy else sampling.seed & _SEED_BITS,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=penalty(ask, "presence_penalty"),
        frequency_penalty=penalty(ask, "frequency_penalty"),
        stop_token_ids=list(sampling.end_ids),
        ignore_eos=True,  # the request's end ids count, whatever the model's are
        max_tokens=ask.max_tokens,
        min_tokens=min(sampling.min_tokens, ask.max_tokens) if sampling.end_ids else 0,
        logprobs=(sampling.top_log_probs or 0) if wants_log_probs else None,
        logit_bias=dict(sampling.bias) or None,
        structured_outputs=None if ask.guide is None else _guide(*ask.guide),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"spindle": {"most_drafted": ask.most_drafted, "control": ask.control}},
        skip_clone=True,
    )
    if sampling.bad_words:
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return params


_SEED_BITS = 2**63 - 1
"""The bits of a seed that vLLM takes."""


def _guide(kind: str, text: str) -> StructuredOutputsParams:
    if kind == "json":
        return StructuredOutputsParams(json_object=True)
    if kind == "ebnf_grammar":
        from llguidance.gbnf_to_lark import any_to_lark

        text = any_to_lark(text)
    return StructuredOutputsParams(**{_GUIDES[kind]: text})
