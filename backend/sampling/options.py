"""Sampling parameters made from a request's options."""

from __future__ import annotations

import secrets
from dataclasses import fields
from typing import Any

from backend.request import IMPOSSIBLE, LEAST_TEMPERATURE, GenerationRequest, SamplingParams
from backend.tokenizer import Tokenizer

SEED_BITS = 53
"""Bits of a random seed: the reply names it, and readers of JSON that know doubles only keep it."""

_SAME = {field.name for field in fields(SamplingParams)} & {
    field.name for field in fields(GenerationRequest)
}
"""Options that a request has by the same name; absent ones are as ``SamplingParams`` begins."""


def sampling_params(
    request: GenerationRequest, tokenizer: Tokenizer, end_ids: frozenset[int]
) -> SamplingParams:
    """Return how to sample: nothing given means greedy, a seed is drawn for a request that gives
    none; words become token ids.

    Words are tokenised alone and without special tokens; one without tokens has no effect.
    """
    options = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    filters = (request.temperature, request.top_k, request.top_p, request.min_p)
    greedy = all(value is None for value in filters)
    if greedy or options.get("temperature", 1.0) < LEAST_TEMPERATURE:
        options["temperature"] = 0.0
    words = (tuple(tokenizer.encode(word, add_special_tokens=False)) for word in request.bad_words)
    changed: dict[str, Any] = {
        "temperature": options.get("temperature", 1.0),
        "top_p": request.top_p or 1.0,  # 0: off
        "seed": secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
        "end_ids": tuple(sorted(end_ids)),
        "bad_words": (*(word for word in words if word), *request.bad_word_ids),
        "bias": _bias(request, tokenizer),
        "log_probs": request.return_log_probs,
    }
    return SamplingParams(**options | changed)


def _bias(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return (token id, addend): every token of a word gets its weight, and weights of the same
    token add up; minus infinity is a ban.
    """
    addends: dict[int, float] = {}
    for token, addend in request.bias:
        addends[token] = addends.get(token, 0.0) + addend
    for word, weight in zip(
        request.embedding_bias_words, request.embedding_bias_weights, strict=True
    ):
        for token in tokenizer.encode(word, add_special_tokens=False):
            addends[token] = addends.get(token, 0.0) + weight
    return tuple(
        (token, max(addend, IMPOSSIBLE)) for token, addend in sorted(addends.items()) if addend
    )
