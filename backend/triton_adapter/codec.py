"""Triton tensors <-> the domain's request and replies. An error names the field and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.request import ErrorCode, GenerationRequest, RequestError
from backend.triton_adapter.fields import NUMPY_TYPES, TEXT_INPUTS, TEXT_OUTPUTS, Field
from backend.wire import Message

Array = npt.NDArray[Any]

_TEXT_OUTPUT_TYPES = {field.name: NUMPY_TYPES[field.dtype] for field in TEXT_OUTPUTS}

WITHOUT_EFFECT = ("length_penalty", "use_draft_logits")
"""Inputs whose type and shape are checked, and no more."""

_LOWEST = {"max_tokens": 1, "top_k": 0, "num_draft_tokens": 0, "min_tokens": 0}
LARGEST_CHANGE = 1e6
"""Bound of weights and penalties: far beyond any effect, far below what an fp32 logit overflows at."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which optional outputs a request asked for."""

    num_input_tokens: bool = False
    num_output_tokens: bool = False
    perf_metrics: bool = False


def decode(inputs: Mapping[str, Array], *, decoupled: bool = True) -> tuple[GenerationRequest, Wanted]:
    """Return the request that a text model's input tensors (batch dimension first) mean, and the outputs that it wants.

    Raises RequestError (INVALID_ARGUMENT, UNIMPLEMENTED) naming the field.
    """
    given: dict[str, Any] = {}
    for field in TEXT_INPUTS:
        if field.name not in inputs:
            if field.required:
                raise _invalid(f"{field.name} is required")
        elif field.refused is not None:
            _refuse(field, inputs[field.name])
        else:
            values = _values(field, inputs[field.name])
            given[field.name] = tuple(values) if field.dims == (-1,) else values[0]
    for name in WITHOUT_EFFECT:
        given.pop(name, None)
    wanted = Wanted(*(bool(given.pop(f"return_{name}", False)) for name in ("num_input_tokens", "num_output_tokens", "perf_metrics")))
    request = GenerationRequest(**given)
    _check(request, decoupled)
    _check_changes(request)
    return request, wanted


def decode_command(inputs: Mapping[str, Array]) -> str:
    """Return the command given to the model ``spindle``."""
    return str(_values(Field("command", "STRING"), inputs["command"].reshape(1, -1))[0])


def encode_chunk(deltas: Sequence[Message]) -> dict[str, Array]:
    """Return the outputs of one streamed response, which carries one or more deltas."""
    outputs: dict[str, Any] = {"text_output": ["".join(delta["text"] for delta in deltas).encode()]}
    if "log_probs" in deltas[-1]:
        outputs["output_log_probs"] = [[value for delta in deltas for value in delta["log_probs"]]]  # one beam
        outputs["cum_log_probs"] = [deltas[-1]["cum_log_prob"]]
    return {name: _batch_of_one(name, value) for name, value in outputs.items()}


def encode_final(message: Message, earlier: Sequence[Message], wanted: Wanted) -> dict[str, Array]:
    """Return the outputs of a successful last reply; ``earlier`` are the deltas that no response has carried yet."""
    drafted, accepted = message["draft_tokens"], message["accepted_draft_tokens"]
    outputs: dict[str, Any] = {"finish_reason": message["finish_reason"].encode()}
    if wanted.num_input_tokens:
        outputs["num_input_tokens"] = message["num_input_tokens"]
    if wanted.num_output_tokens:
        outputs["num_output_tokens"] = message["num_output_tokens"]
    if wanted.perf_metrics:
        outputs["acceptance_rate"] = accepted / drafted if drafted else 0.0
        outputs["total_accepted_draft_tokens"] = accepted
        outputs["total_draft_tokens"] = drafted
    return encode_chunk([*earlier, message]) | {name: _batch_of_one(name, [value]) for name, value in outputs.items()}


def _batch_of_one(name: str, value: Any) -> Array:
    return np.array([value], dtype=_TEXT_OUTPUT_TYPES[name])


def _values(field: Field, array: Array) -> list[Any]:
    """Return a tensor's Python values, its type and shape checked. Raises RequestError."""
    if array.dtype != NUMPY_TYPES[field.dtype]:
        raise _invalid(f"{field.name} must be {field.dtype}, got {array.dtype}")
    (length,) = field.dims
    if array.ndim != 2 or array.shape[0] < 1 or (length > 0 and array.shape[1] != length):
        raise _invalid(f"{field.name} must have shape [1, {length}], got {list(array.shape)}")
    if array.shape[0] > 1:
        raise _invalid(f"{field.name} has a batch of {array.shape[0]}; a batch over 1 is not supported: send one request for each")
    values: list[Any] = array[0].tolist()
    return [_text(field.name, value) for value in values] if field.dtype == "STRING" else values


def _refuse(field: Field, array: Array) -> None:
    """Raise RequestError (UNIMPLEMENTED) unless a tensor that is not served asks for nothing."""
    values = (value.decode(errors="replace") if isinstance(value, bytes) else value for value in array.flat)
    asking = next((value for value in values if value not in field.neutral), None)
    if asking is not None and field.refused is not None:
        got = repr(asking) if array.size == 1 else f"a tensor of shape {list(array.shape)}"
        raise RequestError(ErrorCode.UNIMPLEMENTED, f"{field.name} is not supported: {field.refused.value}, got {got}")


def _text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"{name} is not valid UTF-8: byte {value[error.start]:#04x} at offset {error.start}") from None


def _check(request: GenerationRequest, decoupled: bool) -> None:
    """Check the ranges. Raises RequestError."""
    if not request.text_input:
        raise _invalid("text_input must not be empty, got ''")
    if request.stream and not decoupled:
        raise _invalid("Streaming is only supported in decoupled mode. Got stream true")
    for name, low in _LOWEST.items():
        value = getattr(request, name)
        if value is not None and value < low:
            raise _invalid(f"{name} must be at least {low}, got {value}")
    if request.temperature is not None and not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise _invalid(f"temperature must be a finite number of at least 0, got {request.temperature:g}")
    if request.top_p is not None and not 0 <= request.top_p <= 1:
        raise _invalid(f"top_p must be between 0 and 1 (0 = off), got {request.top_p:g}")


def _check_changes(request: GenerationRequest) -> None:
    """Check the options that change logits. Raises RequestError."""
    words, weights = request.embedding_bias_words, request.embedding_bias_weights
    if len(words) != len(weights):
        raise _invalid(f"embedding_bias_weights must be as many as embedding_bias_words ({len(words)}), got {len(weights)}")
    for name, low, values in (
        ("repetition_penalty", float(np.float32(1 / LARGEST_CHANGE)), [request.repetition_penalty]),
        ("presence_penalty", -LARGEST_CHANGE, [request.presence_penalty]),
        ("frequency_penalty", -LARGEST_CHANGE, [request.frequency_penalty]),
        ("embedding_bias_weights", -LARGEST_CHANGE, weights),
    ):
        for value in values:
            if value is not None and not low <= value <= LARGEST_CHANGE:
                raise _invalid(f"{name} must be between {low:g} and {LARGEST_CHANGE:g}, got {value:g}")


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
