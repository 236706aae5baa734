"""A request's options in the LLM API's words, or their refusal by name.

The two flows draw tokens by different code. Engines of ``trtllm-build`` use the C++ decoder, which
NVIDIA's ``inflight_batcher_llm`` used. The PyTorch flow has a sampler of its own, which takes every
parameter and ignores those that it does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensorrt_llm import SamplingParams

from backend.engines.hosted import HostedRequest
from backend.request import ErrorCode, RequestError

_FIELDS = inspect.signature(SamplingParams).parameters.keys()
TOP_K_MAX = 1024
"""The C++ decoder clamps a greater top_k silently."""

_IGNORED = "the sampler of TensorRT-LLM's PyTorch flow ignores it"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An option that a flow cannot mean."""

    name: str
    asks: Callable[[HostedRequest], Any]
    """Returns whether a request has it."""
    reason: str


CHECKPOINT_REFUSES = (
    Refusal("min_p", lambda ask: ask.sampling.min_p, _IGNORED),
    Refusal("repetition_penalty", lambda ask: ask.sampling.repetition_penalty != 1.0, _IGNORED),
    Refusal("presence_penalty", lambda ask: ask.sampling.presence_penalty, _IGNORED),
    Refusal("frequency_penalty", lambda ask: ask.sampling.frequency_penalty, _IGNORED),
    Refusal("bad_words", lambda ask: ask.sampling.bad_words, _IGNORED),
    Refusal("top_p_decay", lambda ask: ask.sampling.top_p_decay != 1.0, _IGNORED),
    Refusal(
        "min_tokens",
        lambda ask: ask.sampling.min_tokens,
        "the sampler of TensorRT-LLM's PyTorch flow counts the prompt's tokens, too",
    ),
    Refusal(
        "return_log_probs",
        lambda ask: ask.sampling.reads_log_probs and _is_reshaped(ask),
        "TensorRT-LLM gives those of the model's own logits, before temperature and bias",
    ),
)
ENGINE_REFUSES = (
    Refusal(
        "return_log_probs",
        lambda ask: ask.sampling.reads_log_probs,
        "engines of trtllm-build would have to keep all logits",
    ),
    Refusal(
        "bad_words",
        lambda ask: any(len(word) > 1 for word in ask.sampling.bad_words),
        "the LLM API takes words of one token",
    ),
    Refusal(
        "top_p_decay",
        lambda ask: ask.sampling.top_p_decay != 1.0 and len(ask.tokens) > ask.prompt_tokens,
        "it would begin again with resumed_tokens",
    ),
    Refusal(
        "min_tokens",
        lambda ask: _least(ask) > 0 and len(ask.sampling.end_ids) > 1,
        "TensorRT-LLM holds one end token back, and the model has several",
    ),
    Refusal(
        "prompt_ignore_length",
        lambda ask: ask.sampling.prompt_ignore_length and "prompt_ignore_length" not in _FIELDS,
        "this version of TensorRT-LLM's LLM API has no such parameter",
    ),
    Refusal(
        "runtime_top_k",
        lambda ask: not ask.sampling.greedy and ask.sampling.top_k > TOP_K_MAX,
        f"TensorRT-LLM's is at most {TOP_K_MAX}",
    ),
)


def check(ask: HostedRequest, *, is_engine: bool) -> None:
    """Raise RequestError, naming the option, for what the flow cannot mean."""
    for refusal in ENGINE_REFUSES if is_engine else CHECKPOINT_REFUSES:
        if refusal.asks(ask):
            raise RequestError(
                ErrorCode.UNIMPLEMENTED, f"{refusal.name} is not supported: {refusal.reason}"
            )


def sampling_params(ask: HostedRequest, *, vocab_size: int, is_engine: bool) -> SamplingParams:
    """Return what a request asks of TensorRT-LLM: end tokens and a length only, for stop words are
    the session's.
    """
    sampling = ask.sampling
    first = sampling.end_ids[0] if sampling.end_ids else -1
    words: dict[str, Any] = {
        "end_id": first,
        "pad_id": max(first, 0),
        "stop_token_ids": [token for token in sampling.end_ids if token != first] or None,
        "include_stop_str_in_output": True,  # else it takes the token back
        "max_tokens": ask.max_tokens,
        "detokenize": False,
        "add_special_tokens": False,
    }
    if sampling.greedy:
        words["top_k"] = 1
    else:
        words |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
        words["seed"] = sampling.seed
    if sampling.bias:
        tokens, addends = zip(*sampling.bias, strict=True)
        bias = torch.zeros(vocab_size)
        words["embedding_bias"] = bias.index_add_(0, torch.tensor(tokens), torch.tensor(addends))
    if sampling.reads_log_probs:
        words["logprobs"] = sampling.top_log_probs or 0
    if is_engine:
        words |= _decoder_words(ask)
    return SamplingParams(**words)


def _decoder_words(ask: HostedRequest) -> dict[str, Any]:
    """Return the options of the C++ decoder that are not at their neutral value."""
    sampling = ask.sampling
    values: tuple[tuple[str, Any, Any], ...] = (
        ("min_p", sampling.min_p, 0.0),
        ("repetition_penalty", sampling.repetition_penalty, 1.0),
        ("presence_penalty", sampling.presence_penalty, 0.0),
        ("frequency_penalty", sampling.frequency_penalty, 0.0),
        ("prompt_ignore_length", min(sampling.prompt_ignore_length, ask.prompt_tokens), 0),
        ("min_tokens", _least(ask), 0),
        ("top_p_decay", sampling.top_p_decay, 1.0),
        ("bad_token_ids", [word[0] for word in sampling.bad_words], []),
    )
    words: dict[str, Any] = {name: value for name, value, neutral in values if value != neutral}
    if "top_p_decay" in words:
        words["top_p_min"] = sampling.top_p_min or None
        words["top_p_reset_ids"] = None if sampling.top_p_reset_id < 0 else sampling.top_p_reset_id
    return words


def _least(ask: HostedRequest) -> int:
    """Return how many of the tokens yet to come may not be an end token."""
    return max(0, ask.sampling.min_tokens - (len(ask.tokens) - ask.prompt_tokens))


def _is_reshaped(ask: HostedRequest) -> bool:
    """Return whether the log-probabilities of the contract are not those of the model's logits."""
    sampling = ask.sampling
    return bool(sampling.bias) or sampling.temperature not in (0.0, 1.0)
