"""Dynamo's requests as tensors of the model ``tensorrt_llm``, and that model's responses as
Dynamo's chunks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.triton_adapter.openai_options import as_tensors

Array = NDArray[Any]

OPTIONS = {
    "temperature": "temperature",
    "top_p": "runtime_top_p",
    "top_k": "runtime_top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
"""Our tensors by the names of Dynamo's sampling options."""
ANNOTATIONS = ("num_draft_tokens", "remember", "max_tokens", "json_schema", "regex")
"""Options in ``nvext.annotations``, as ``name=value``: Dynamo refuses fields that it does not know,
and passes annotations on.
"""
GUIDES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}
"""Our kinds of grammars by Dynamo's."""
FINISH_REASONS = {"length": "length", "end_id": "stop", "stop_words": "stop"}
_TYPES = {"seed": np.uint64, "runtime_top_k": np.int32, "prompt_ignore_length": np.int32}


class WrongRequestError(ValueError):
    """A request that cannot be served; the message names the field and the value."""


def annotations_of(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the options among a request's annotations."""
    pairs = (text.partition("=") for text in request.get("annotations") or ())
    return {name: value for name, is_pair, value in pairs if is_pair and name in ANNOTATIONS}


def resumed_tokens(
    request: Mapping[str, Any], annotations: Mapping[str, str], marker: Sequence[int]
) -> int:
    """Return how many of the last token ids are text that another worker wrote.

    Dynamo does not say. It does lower ``max_tokens``, so an annotation with the first value tells
    the difference; in chats the text follows ``marker``, with which the template ends a prompt.
    """
    ids = request["token_ids"]
    if (most := annotations.get("max_tokens")) is not None:
        remaining = (request.get("stop_conditions") or {}).get("max_tokens")
        first = _integer("max_tokens", most)
        count = 0 if remaining is None else first - remaining
        return min(max(count, 0), len(ids) - 1)
    marker, size = list(marker), len(marker)
    if size:
        for end in range(len(ids), size - 1, -1):
            if ids[end - size : end] == marker:
                return len(ids) - end
    return 0


def tensors_of(
    request: Mapping[str, Any], name: str, marker: Sequence[int], context_tokens: int
) -> dict[str, Array]:
    """Return the inputs of a request called ``name``. Raises WrongRequestError."""
    ids, annotations = request["token_ids"], annotations_of(request)
    stop = request.get("stop_conditions") or {}
    sampling = request.get("sampling_options") or {}
    output = request.get("output_options") or {}
    if (count := sampling.get("n") or 1) != 1:
        raise WrongRequestError(f"n must be 1, got {count}")
    most = stop.get("max_tokens") or max(1, context_tokens - len(ids))
    tensors = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[most]], np.int32),
        "streaming": np.array([[True]]),
    }
    tensors |= _sampling(sampling, name) | _ends(stop) | _guide(sampling, annotations)
    if count := resumed_tokens(request, annotations, marker):
        tensors["resumed_tokens"] = np.array([[count]], np.int32)
    if (count := output.get("logprobs")) is not None:
        if int(count) > 1:
            raise WrongRequestError(f"logprobs must be at most 1, the chosen token's, got {count}")
        tensors["return_log_probs"] = np.array([[True]])
    if output.get("prompt_logprobs") is not None:
        raise WrongRequestError(
            f"prompt_logprobs is not supported, got {output['prompt_logprobs']}"
        )
    if salt := (request.get("routing") or {}).get("cache_salt"):
        tensors["cache_salt"] = _texts(salt)
    if (length := annotations.get("num_draft_tokens")) is not None:
        tensors["num_draft_tokens"] = np.array([[_integer("num_draft_tokens", length)]], np.int32)
    if (remember := annotations.get("remember")) is not None:
        if remember not in ("true", "false"):
            raise WrongRequestError(
                f"the annotation remember must be true or false, got {remember!r}"
            )
        tensors["remember"] = np.array([[remember == "true"]])
    return tensors


def seed_of(name: str) -> int:
    """Return the seed of a request without one: from its id, which another worker gets, too."""
    return zlib.crc32(name.encode())


def _sampling(options: Mapping[str, Any], name: str) -> dict[str, Array]:
    """Return the sampling options, which have OpenAI's meaning."""
    values = {
        key: value
        for key, value in options.items()
        if key in OPTIONS and value is not None and not (key == "top_k" and value < 0)
    }
    values.setdefault("seed", seed_of(name))
    named = {OPTIONS.get(key, key): value for key, value in as_tensors(values).items()}
    return {key: np.array([[value]], _TYPES.get(key, np.float32)) for key, value in named.items()}


def _ends(stop: Mapping[str, Any]) -> dict[str, Array]:
    """Return what ends a text; words, which Dynamo looks for in the text, end it there."""
    tensors: dict[str, Array] = {}
    if stop.get("ignore_eos"):
        tensors["end_id"] = np.array([[-1]], np.int32)
    if least := stop.get("min_tokens"):
        tensors["min_tokens"] = np.array([[least]], np.int32)
    lists = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
    ids = sorted({token for name in lists for token in stop.get(name) or ()})
    if ids and not stop.get("ignore_eos"):
        tensors["stop_words_list"] = np.array([[ids, [*range(1, len(ids) + 1)]]], np.int32)
    return tensors


def _guide(options: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Array]:
    guides = {key: value for key, value in (options.get("guided_decoding") or {}).items() if value}
    guides |= {key: annotations[key] for key in ("json_schema", "regex") if key in annotations}
    if choices := guides.pop("choice", None):
        guides["regex"] = "|".join(map(re.escape, choices))
    for name in ("backend", "whitespace_pattern"):
        guides.pop(name, None)
    if not guides:
        return {}
    if len(guides) > 1 or (kind := next(iter(guides))) not in (*GUIDES, "json_schema"):
        raise WrongRequestError(
            f"guided_decoding must be one of {', '.join(GUIDES)}, got {[*guides]}"
        )
    guide = guides[kind]
    guide = guide if isinstance(guide, str) else json.dumps(guide)
    return {
        "guided_decoding_guide_type": _texts(GUIDES.get(kind, kind)),
        "guided_decoding_guide": _texts(guide),
    }


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise WrongRequestError(f"the annotation {name} must be a whole number, got {text!r}")
    return int(text)


def _texts(text: str) -> Array:
    return np.array([[text.encode()]], np.object_)


class ResponseError(Exception):
    """A response that is an error: Triton's code and a sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Chunks:
    """Makes Dynamo's chunks of a request's responses."""

    def __init__(self, prompt_tokens: int, *, log_probs: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._log_probs = log_probs
        self._tokens = 0

    def chunk(self, outputs: Mapping[str, Array | None]) -> dict[str, Any]:
        """Return the chunk of a response, outputs [1, ...] by name. Raises ResponseError."""
        reason = _item(outputs["finish_reason"])
        if reason is not None and reason.startswith("error:"):
            code, _, message = reason.removeprefix("error:").partition(" ")
            raise ResponseError(code, message)
        tokens = _list(outputs["output_ids"])
        self._tokens += len(tokens)
        reply: dict[str, Any] = {"token_ids": tokens, "index": 0}
        if self._log_probs and tokens:
            reply["log_probs"] = _list(outputs["output_log_probs"])
        if reason is not None:
            reply["finish_reason"] = FINISH_REASONS[reason]
            reply["completion_usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": self._prompt_tokens + self._tokens,
            }
            if (seed := outputs["seed"]) is not None:
                reply["engine_data"] = {"seed": int(seed.item())}
        return reply


def _item(
    array: Array | None,  # [1, 1] or empty
) -> str | None:
    return None if array is None or not array.size else array.item().decode()


def _list(
    array: Array | None,  # [1, 1, tokens]
) -> list[Any]:
    return [] if array is None else array.ravel().tolist()
