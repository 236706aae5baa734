"""The meaning of a request's options, by the book and without the engines' code: in numpy, one row
at a time.
"""

import math
from typing import Any

import numpy as np

from backend.request import SamplingParams
from tests.fakes.markov import _UNLIKELY_LOGIT, ORDER, VOCAB_SIZE, _candidates

LETTER_LOGITS = [4.0 + math.log(share) for share in (0.6, 0.25, 0.1, 0.05)]
BANNED = -1e30


def processed(
    logits: np.ndarray, tokens: list[int], prompt_tokens: int, sampling: SamplingParams
) -> np.ndarray:
    """The options in TensorRT-LLM's order: bias, temperature, penalties, minimum length, bad
    words.
    """
    scores = logits.copy()
    for token, addend in sampling.bias:
        scores[token] += addend
    scores /= sampling.temperature or 1.0
    for token in set(tokens):
        scores[token] = (
            scores[token] * sampling.repetition_penalty
            if scores[token] < 0
            else scores[token] / sampling.repetition_penalty
        )
    counted = tokens[min(prompt_tokens, sampling.prompt_ignore_length) :]
    for token in set(counted):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * counted.count(
            token
        )
    if len(tokens) - prompt_tokens < sampling.min_tokens:
        scores[list(sampling.end_ids)] = BANNED
    for *head, last in sampling.bad_words:
        if tokens[len(tokens) - len(head) :] == head:
            scores[last] = BANNED
    if sampling.guide is not None:
        allowed: Any = sampling.guide.mask(tokens[prompt_tokens:])
        scores[np.logical_not(allowed)] = -2e30
    return scores


def top_p_after(output: list[int], sampling: SamplingParams) -> float:
    """``top_p`` as it decays, token by token."""
    top_p = sampling.top_p
    for token in output:
        top_p = (
            sampling.top_p
            if token == sampling.top_p_reset_id
            else max(top_p * sampling.top_p_decay, sampling.top_p_min)
        )
    return top_p


def greedy(
    prompt: str, max_tokens: int, sampling: SamplingParams
) -> tuple[list[int], list[float], bool]:
    """Return the tokens that the fake target writes after a prompt, their log-probabilities, and
    whether an end id ended them.
    """
    tokens = list(prompt.encode())
    prompt_tokens, log_probs = len(tokens), list[float]()
    while len(log_probs) < max_tokens:
        logits = np.full(VOCAB_SIZE, _UNLIKELY_LOGIT)
        logits[_candidates(b"target", bytes(tokens[-ORDER:]))] = LETTER_LOGITS
        scores = processed(logits, tokens, prompt_tokens, sampling)
        tokens.append(int(scores.argmax()))
        log_probs.append(float(scores.max() - np.log(np.exp(scores).sum())))
        if tokens[-1] in sampling.end_ids:
            return tokens[prompt_tokens:], log_probs, True
    return tokens[prompt_tokens:], log_probs, False
