"""The way to Triton: one request, one gRPC stream, so that giving up one ends it and no other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient

from backend.triton_adapter.fields import NUMPY_TYPES, TEXT_INPUTS
from backend.triton_adapter.responder import ERRORS_AS_OUTPUTS

_TYPES = {field.name: field.dtype for field in TEXT_INPUTS}
_STATUS = {"INVALID_ARGUMENT": 400, "UNIMPLEMENTED": 400, "UNAVAILABLE": 503, "CANCELLED": 499}


class UpstreamError(Exception):
    """What Triton answers instead of a text: an HTTP status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Token:
    """A token's bytes, its log-probability, and (bytes, log-probability) of the likeliest at its place."""

    data: bytes
    log_prob: float
    top: list[tuple[bytes, float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of the text of ``prompt`` and ``sequence``; ``finish_reason`` and the counts come with its last piece.

    ``tokens`` are there where they were asked for, without those that have no text.
    """

    prompt: int
    sequence: int
    text: str
    finish_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    tokens: list[Token] = field(default_factory=list)


class Triton:
    """A client of the model ``tensorrt_llm_bls``; make it inside the event loop."""

    def __init__(self, address: str, model: str = "tensorrt_llm_bls") -> None:
        self._client = grpcclient.InferenceServerClient(address)
        self._model = model

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def command(self, command: str) -> dict[str, Any]:
        """Return the reply to a command of the administrative interface. Raises UpstreamError."""
        given = grpcclient.InferInput("command", [1], "BYTES")
        given.set_data_from_numpy(np.array([command.encode()], np.object_))

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "spindle", "inputs": [given]}

        responses = self._client.stream_infer(requests())
        try:
            async for result, failure in responses:
                if failure is not None:
                    raise _refused(failure)
                reply: dict[str, Any] = json.loads(result.as_numpy("reply").item())
                return reply
        except grpc.RpcError as error:
            raise UpstreamError(_STATUS.get(error.code().name, 500), str(error.details())) from None
        finally:
            responses.cancel()
        raise UpstreamError(503, "no reply")

    async def generate(self, prompts: list[str], options: dict[str, Any]) -> AsyncIterator[Piece]:
        """Yield the pieces of the texts that continue the prompts. Raises UpstreamError. Closing the iterator cancels them."""
        try:
            inputs = _tensors(prompts, options)
        except UnicodeEncodeError as error:
            raise UpstreamError(400, f"text has a lone surrogate at character {error.start}") from None

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": self._model, "inputs": inputs, "parameters": {ERRORS_AS_OUTPUTS: True}}

        responses = self._client.stream_infer(requests())
        try:
            async for result, failure in responses:
                if failure is not None:
                    raise _refused(failure)
                yield _piece(result)
        except grpc.RpcError as error:
            raise UpstreamError(_STATUS.get(error.code().name, 500), str(error.details())) from None
        finally:
            responses.cancel()


def _tensors(prompts: list[str], options: dict[str, Any]) -> list[Any]:
    """Return the inputs: every prompt is an element of a batch, and all have the same options."""
    made = []
    for name, value in {"text_input": None, **options}.items():
        rows = [[prompt] for prompt in prompts] if name == "text_input" else [value if isinstance(value, list) else [value]] * len(prompts)
        strings = _TYPES[name] == "STRING"
        array = np.array([[item.encode() for item in row] for row in rows] if strings else rows, dtype=NUMPY_TYPES[_TYPES[name]])
        made.append(grpcclient.InferInput(name, array.shape, "BYTES" if strings else _TYPES[name]))
        made[-1].set_data_from_numpy(array)
    return made


def _refused(failure: Exception) -> UpstreamError:
    """Return what Triton's own refusal means: too many prompts, or a model that is not there (again) yet."""
    return UpstreamError(400 if "batch-size" in str(failure) else 503, str(failure))


def _piece(result: Any) -> Piece:
    def number(name: str) -> int:
        array = result.as_numpy(name)
        return 0 if array is None else int(array.item())

    text, reason = result.as_numpy("text_output").item().decode(), result.as_numpy("finish_reason")
    if reason is not None and reason.item().startswith(b"error:"):
        raise UpstreamError(_STATUS.get(reason.item().decode().removeprefix("error:"), 500), text)
    return Piece(
        number("batch_index"),
        number("sequence_index"),
        text,
        None if reason is None else reason.item().decode(),
        number("num_input_tokens"),
        number("num_output_tokens"),
        _tokens(result),
    )


def _tokens(result: Any) -> list[Token]:
    data, log_probs = result.as_numpy("output_tokens"), result.as_numpy("output_log_probs")
    if data is None or log_probs is None:
        return []
    names, values = result.as_numpy("top_tokens"), result.as_numpy("top_log_probs")
    rows = (
        [[]] * data.shape[1] if names is None else [list(zip(*row, strict=True)) for row in zip(names[0], values[0].tolist(), strict=True)]
    )
    return [Token(*token) for token in zip(data[0], log_probs[0, 0].tolist(), rows, strict=True) if token[0]]
