"""Triton tensors <-> the domain's request and replies. An error names the field and the value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from backend.ipc.messages import Chunk, Final
from backend.limits import MOST_ELEMENTS, check_sizes
from backend.request import GUIDE_TYPES, ErrorCode, GenerationRequest, RequestError
from backend.triton_adapter.fields import (
    NUMPY_TYPES,
    TEXT_INPUTS,
    TEXT_OUTPUTS,
    TOKEN_INPUTS,
    TOKEN_OUTPUTS,
    Field,
)

Array = npt.NDArray[Any]

_OUTPUT_TYPES = {field.name: NUMPY_TYPES[field.dtype] for field in (*TEXT_OUTPUTS, *TOKEN_OUTPUTS)}

_INPUT_NAMES = tuple({field.name: None for field in (*TEXT_INPUTS, *TOKEN_INPUTS)})
_LONGEST_NAME = max(map(len, _INPUT_NAMES))
MOST_PARAMETERS = 64
"""Parameters of a request that are looked at for misspelt inputs."""
LEAST_LIKENESS = 0.85
"""``difflib`` ratio from which on a name counts as a misspelling of another: two wrong letters in
``temperature``.
"""

_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")


@dataclass(frozen=True, slots=True)
class WantedOutputs:
    """Which optional outputs a request asked for, and whether it gets tokens instead of text. The
    indices are those of one part of a request that has several: a Triton batch, or several texts.
    """

    num_input_tokens: bool = False
    num_output_tokens: bool = False
    perf_metrics: bool = False
    tokens: bool = False
    batch_index: int | None = None
    sequence_index: int | None = None


Part = tuple[GenerationRequest, WantedOutputs]


def decode(
    inputs: Mapping[str, Array],  # [batch, ...] by name
    fields: Seq[Field] = TEXT_INPUTS,
    *,
    decoupled: bool = True,
    timeout_s: float | None = None,
) -> list[Part]:
    """Return the requests that one Triton request's tensors mean, and the outputs that each wants.

    ``fields`` are the model's inputs. Raises RequestError (INVALID_ARGUMENT, UNIMPLEMENTED) naming
    the field.
    """
    batch = max((len(array) for array in inputs.values() if array.ndim), default=1)
    parts: list[Part] = []
    for row in range(batch):
        tensors = {name: array[row : row + 1] for name, array in inputs.items()}
        values = meanings(tensors, fields) | {"timeout_s": timeout_s}
        sequences = values.pop("num_return_sequences", 1)
        wanted = _wanted_outputs(values, row if batch > 1 else None)
        request = _request(values, decoupled)
        parts += [(request, wanted)] if sequences == 1 else _several(request, wanted, sequences)
    if len(parts) > 1 and not decoupled:
        raise invalid(
            f"a batch or num_return_sequences over 1 is only supported in decoupled mode, got "
            f"{len(parts)} texts"
        )
    return parts


def _wanted_outputs(values: dict[str, Any], batch_index: int | None) -> WantedOutputs:
    """Take from what was given which outputs it asks for."""
    names = ("num_input_tokens", "num_output_tokens", "perf_metrics")
    flags = {name: bool(values.pop(f"return_{name}", False)) for name in names}
    return WantedOutputs(tokens="input_lengths" in values, batch_index=batch_index, **flags)


def _request(values: dict[str, Any], decoupled: bool) -> GenerationRequest:
    """Return what one element of the batch means."""
    if "input_lengths" in values:
        values |= {
            "text_input": "",
            "input_ids": _prompt(values.pop("input_ids", ()), values.pop("input_lengths")),
        }
        values.pop("stop", None)
    _join_bias(values)
    _check_guide(values)
    request = GenerationRequest(**values)
    _check(request, decoupled)
    return request


def _several(request: GenerationRequest, wanted: WantedOutputs, sequences: int) -> list[Part]:
    """Return a part for each of several texts to one prompt; their seeds follow one another."""
    seeds = [None if request.seed is None else (request.seed + i) % 2**64 for i in range(sequences)]
    return [
        (replace(request, seed=seed), replace(wanted, sequence_index=index))
        for index, seed in enumerate(seeds)
    ]


def meanings(inputs: Mapping[str, Array], fields: Seq[Field]) -> dict[str, Any]:
    """Return what the tensors [1, ...] of one element of a batch say, by attribute. Raises
    RequestError naming the field.
    """
    values: dict[str, Any] = {}
    for field in fields:
        if field.name not in inputs:
            if field.required:
                raise invalid(f"{field.name} is required")
        elif inputs[field.name].size > MOST_ELEMENTS:
            raise invalid(
                f"{field.name} must have at most {MOST_ELEMENTS} elements, got "
                f"{inputs[field.name].size}"
            )
        elif field.refused is not None:
            _refuse(field, inputs[field.name])
        elif not field.effect:
            _check_type(field, inputs[field.name])
        else:
            values[field.attribute] = _meaning(field, inputs[field.name])
    return values


def check_parameters(parameters: Iterable[str]) -> None:
    """Refuse a request parameter that is all but the name of an input: over HTTP a misspelt input
    comes as a parameter.

    Others are left alone: NVIDIA's models accept any. Raises RequestError naming both.
    """
    for name in islice(parameters, MOST_PARAMETERS):
        if closest := _closest_name(name):
            raise invalid(f"{name} is not an input: did you mean {closest}?")


@lru_cache(256)
def _closest_name(name: str) -> str | None:
    """Return the input that a name is a misspelling of. One that another of the models has is
    none.
    """
    if len(name) > 2 * _LONGEST_NAME:  # no misspelling, and slow to compare
        return None
    near = difflib.get_close_matches(name, _INPUT_NAMES, 1, LEAST_LIKENESS)
    return near[0] if near and near[0] != name else None


def asks_to_stop(inputs: Mapping[str, Array]) -> bool:
    """Return whether a request to ``tensorrt_llm``, tensors [batch, ...] by name, asks that another
    be stopped.
    """
    return "stop" in inputs and bool(inputs["stop"].any())


def decode_command(inputs: Mapping[str, Array]) -> tuple[str, str]:
    """Return the command given to the model ``spindle``, and the secret ('' if there is none), of
    tensors [1].
    """

    def text(name: str) -> str:
        return str(_values(Field(name, "STRING"), inputs[name].reshape(1, -1))[0])

    return text("command"), text("secret") if "secret" in inputs else ""


def encode_chunk(deltas: Seq[Chunk], wanted: WantedOutputs) -> dict[str, Array]:
    """Return the outputs of one streamed response, which carries one or more deltas (none: of a
    request that was stopped).
    """
    outputs: dict[str, Any] = {}
    if wanted.tokens:
        ids = [token for delta in deltas for token in delta.tokens or ()]
        outputs |= {"output_ids": [ids], "sequence_length": [len(ids)]}  # one beam
    else:
        outputs["text_output"] = ["".join(delta.text for delta in deltas).encode()]
    if wanted.batch_index is not None:
        outputs["batch_index"] = [wanted.batch_index]
    if wanted.sequence_index is not None:
        outputs["sequence_index"] = [wanted.sequence_index]
    if deltas and deltas[-1].log_probs is not None:
        values = [value for delta in deltas for value in delta.log_probs or ()]
        outputs |= {"output_log_probs": [values], "cum_log_probs": [deltas[-1].cum_log_prob]}
    outputs |= _extras(deltas)
    return {name: _batch_of_one(name, value) for name, value in outputs.items()}


def _extras(deltas: Seq[Chunk]) -> dict[str, Any]:
    """Return the outputs that few requests ask for."""
    outputs: dict[str, Any] = {}
    if any(delta.top is not None for delta in deltas):
        outputs["output_tokens"] = [token for delta in deltas for token in delta.token_bytes or ()]
        rows = [row for delta in deltas for row in delta.top or ()]
        if rows:
            outputs["top_tokens"] = [[token for token, _ in row] for row in rows]
            outputs["top_log_probs"] = [[value for _, value in row] for row in rows]
    for prompt in (delta.prompt for delta in deltas if delta.prompt is not None):  # one at most
        outputs["prompt_tokens"] = prompt.tokens
        outputs["prompt_log_probs"] = prompt.log_probs
        if any(prompt.top):
            outputs["prompt_top_tokens"] = [[token for token, _ in row] for row in prompt.top]
            outputs["prompt_top_log_probs"] = [[value for _, value in row] for row in prompt.top]
    for name, nesting in (("context_logits", 0), ("generation_logits", 1)):
        arrays = [array for delta in deltas if (array := getattr(delta, name)) is not None]
        if arrays:
            joined = np.concatenate(arrays)
            outputs[name] = joined[None] if nesting else joined  # one beam
    return outputs


def load_arrays(chunk: Chunk) -> Chunk:
    """Return a message with the logits that it names the files of, and remove the files."""
    arrays = {}
    for name in ("context_logits", "generation_logits"):
        if (file := getattr(chunk, name)) is not None:
            arrays[name] = np.load(file, allow_pickle=False)
            Path(file).unlink()
    return structs.replace(chunk, **arrays) if arrays else chunk


def encode_final(message: Final, earlier: Seq[Chunk], wanted: WantedOutputs) -> dict[str, Array]:
    """Return the outputs of a successful last reply; ``earlier`` are the deltas that no response
    has carried yet.
    """
    drafted, accepted = message.draft_tokens, message.accepted_draft_tokens
    outputs: dict[str, Any] = {"finish_reason": message.finish_reason.value.encode()}
    if message.seed is not None:
        outputs["seed"] = message.seed
    if wanted.num_input_tokens:
        outputs["num_input_tokens"] = message.num_input_tokens
    if wanted.num_output_tokens:
        outputs["num_output_tokens"] = message.num_output_tokens
    if wanted.perf_metrics:
        outputs["acceptance_rate"] = accepted / drafted if drafted else 0.0
        outputs["total_accepted_draft_tokens"] = accepted
        outputs["total_draft_tokens"] = drafted
        outputs |= dict(
            zip(_TIMES, (round(time_s * 1e9) for time_s in message.times_s), strict=True)
        )
        new, reused = message.kv_blocks
        outputs |= {
            "kv_cache_alloc_new_blocks": new,
            "kv_cache_reused_blocks": reused,
            "kv_cache_alloc_total_blocks": new + reused,
        }
    lists = {name: [value] for name, value in outputs.items()}
    if wanted.perf_metrics:
        lists |= _by_draft(message.drafts)
        lists |= _by_step(message.verified_steps, message.k_max)
    return encode_chunk([*earlier, message], wanted) | {
        name: _batch_of_one(name, values) for name, values in lists.items()
    }


def _by_draft(drafts: Seq[Seq[Any]]) -> dict[str, list[Any]]:
    """Return the outputs of (name, proposed, accepted) tokens; none where nothing was proposed."""
    if not drafts:
        return {}
    names, proposed, accepted = (list(column) for column in zip(*drafts, strict=True))
    return {
        "draft_names": [name.encode() for name in names],
        "draft_tokens": proposed,
        "accepted_draft_tokens": accepted,
    }


def _by_step(steps: Seq[tuple[int, int]], most: int) -> dict[str, list[int]]:
    """Return the outputs of (proposed, accepted) tokens of each step that verified a proposal."""
    accepted = [tokens for _, tokens in steps]
    histogram = np.bincount(np.array(accepted, np.int64), minlength=most + 1).tolist()
    if not steps:
        return {"acceptance_histogram": histogram}
    return {
        "acceptance_histogram": histogram,
        "per_step_drafted": [tokens for tokens, _ in steps],
        "per_step_accepted": accepted,
    }


def _batch_of_one(name: str, value: Any) -> Array:
    return np.array([value], dtype=_OUTPUT_TYPES[name])


def _check_type(field: Field, array: Array) -> None:
    """Raise RequestError for a tensor, [1, ...], of another type than its field's."""
    if array.dtype != NUMPY_TYPES[field.dtype]:
        raise invalid(f"{field.name} must be {field.dtype}, got {array.dtype}")


def _values(field: Field, array: Array) -> list[Any]:
    """Return the Python values of a tensor [1, n], its type and shape checked. Raises
    RequestError.
    """
    _check_type(field, array)
    (length,) = field.dims
    if array.ndim != 2 or array.shape[0] != 1 or (length > 0 and array.shape[1] != length):
        raise invalid(f"{field.name} must have shape [1, {length}], got {list(array.shape)}")
    values: list[Any] = array[0].tolist()
    if field.range is not None:
        for value in values:
            if wrong := field.range.wrong(value):
                raise invalid(f"{field.name} {wrong}")
    return [_text(field.name, value) for value in values] if field.dtype == "STRING" else values


def _meaning(field: Field, array: Array) -> Any:
    """Return what a tensor [1, n] says: a value, a tuple of them, or (token id, addend) of a bias;
    of one [1, 2, n], words as token ids.
    """
    if len(field.dims) > 1:
        return _words(field, array)
    values = _values(field, array)
    if field.attribute == "bias":
        last = len(values) - 1  # kept even if it is 0: the engine checks how many there were
        return tuple((n, addend) for n, addend in enumerate(values) if addend or n == last)
    return tuple(values) if field.dims == (-1,) else values[0]


def _words(field: Field, array: Array) -> tuple[tuple[int, ...], ...]:
    """Return the words of a tensor [1, 2, n]: their ids in a row, and the end of each in it, padded
    with -1.
    """
    _check_type(field, array)
    if array.ndim != 3 or array.shape[:2] != (1, 2):
        raise invalid(f"{field.name} must have shape [1, 2, -1], got {list(array.shape)}")
    ids, ends = array[0].tolist()
    ends = [end for end in ends if end != -1]
    if any(not low < end <= len(ids) for low, end in zip([0, *ends], ends, strict=False)):
        raise invalid(
            f"{field.name} must have rising ends of words, at most {len(ids)}, in its second "
            f"row, got {ends}"
        )
    return tuple(tuple(ids[low:end]) for low, end in zip([0, *ends], ends, strict=False))


def _prompt(ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    if not 1 <= length <= len(ids):
        raise invalid(f"input_lengths must be between 1 and the {len(ids)} input_ids, got {length}")
    return ids[:length]


def _refuse(field: Field, array: Array) -> None:
    """Raise RequestError (UNIMPLEMENTED) unless a tensor, [1, ...], that is not served asks for
    nothing.
    """
    values = (
        value.decode(errors="replace") if isinstance(value, bytes) else value
        for value in array.flat
    )
    asking = next((value for value in values if value not in field.neutral), None)
    if asking is not None and field.refused is not None:
        got = repr(asking) if array.size == 1 else f"a tensor of shape {list(array.shape)}"
        raise RequestError(
            ErrorCode.UNIMPLEMENTED,
            f"{field.name} is not supported: {field.refused.value}, got {got}",
        )


def _text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise invalid(
            f"{name} is not valid UTF-8: byte {value[error.start]:#04x} at offset {error.start}"
        ) from None


def _check(request: GenerationRequest, decoupled: bool) -> None:
    """Check what goes together. Raises RequestError."""
    if not (request.text_input or request.prompt_token_ids or request.input_ids is not None):
        raise invalid("text_input must not be empty, got ''")
    if request.text_input and request.prompt_token_ids:
        raise invalid(
            f"text_input must be empty with prompt_token_ids, got {request.text_input[:40]!r}"
        )
    check_sizes(request)
    if request.stream and not decoupled:
        raise invalid("Streaming is only supported in decoupled mode. Got stream true")
    words, weights = request.embedding_bias_words, request.embedding_bias_weights
    if len(words) != len(weights):
        raise invalid(
            f"embedding_bias_weights must be as many as embedding_bias_words ({len(words)}), got "
            f"{len(weights)}"
        )


def _join_bias(values: dict[str, Any]) -> None:
    """Make one bias of token ids and their addends. Raises RequestError."""
    ids, addends = values.pop("logit_bias_ids", ()), values.pop("logit_bias_values", ())
    if len(ids) != len(addends):
        raise invalid(
            f"logit_bias_values must be as many as logit_bias_ids ({len(ids)}), got {len(addends)}"
        )
    if ids:
        values["bias"] = tuple(zip(ids, addends, strict=True))


def _check_guide(values: dict[str, Any]) -> None:
    """Check the guide, and forget one that is empty. Raises RequestError."""
    kind, text = (values.get(name) or None for name in ("guide_type", "guide"))
    if kind not in (None, *GUIDE_TYPES):
        raise invalid(
            f"guided_decoding_guide_type must be one of {', '.join(GUIDE_TYPES)}, got {kind!r}"
        )
    if kind is None and text is not None:
        raise invalid("guided_decoding_guide must come with guided_decoding_guide_type, got none")
    if kind not in (None, "json") and text is None:
        raise invalid(
            f"guided_decoding_guide is required with guided_decoding_guide_type {kind!r}, got none"
        )
    values |= {"guide_type": kind, "guide": text}


def invalid(message: str) -> RequestError:
    """Return the error of a bad tensor."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
