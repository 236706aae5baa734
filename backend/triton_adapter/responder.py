"""``pb_utils`` objects made and read: the only place that builds Triton responses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from backend.request import ErrorCode
from backend.triton_adapter.codec import Array

_TRITON_NAMES = {ErrorCode.INVALID_ARGUMENT: "INVALID_ARG", ErrorCode.UNIMPLEMENTED: "UNSUPPORTED"}
"""Codes that ``TritonError`` names otherwise than gRPC does."""


ERRORS_AS_OUTPUTS = "spindle_errors_as_outputs"
"""A request parameter: errors come as the output ``finish_reason``, which is then ``error:``, the
code, a space and the sentence.

Triton's gRPC streams tell no code otherwise, but for the header ``triton_grpc_error``, and with
that Triton 2.51 crashes now and then.
"""
MOST_MESSAGE_CHARACTERS = 1000
"""Length of an error's message: gRPC refuses metadata over 8 kB, and a message may quote what the
client sent.
"""


class Responder:
    """Sends one Triton request's responses; ``pb_utils`` is the module that exists in Triton's
    stubs only.
    """

    __slots__ = ("_as_outputs", "_pb_utils", "_sender")

    def __init__(self, pb_utils: Any, sender: Any, *, errors_as_outputs: bool = False) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._as_outputs = errors_as_outputs

    def send(self, outputs: dict[str, Array], *, final: bool) -> None:
        """Send outputs, [batch, ...] by name, the last ones together with the final flag."""
        tensors = [self._pb_utils.Tensor(name, array) for name, array in outputs.items()]
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(self._pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send the error that ends the request."""
        message = (
            message
            if len(message) <= MOST_MESSAGE_CHARACTERS
            else message[:MOST_MESSAGE_CHARACTERS] + "..."
        )
        if self._as_outputs:
            reason = f"error:{code.value} {message}".encode("utf-8", "replace")
            self.send({"finish_reason": np.array([[reason]], np.object_)}, final=True)
            return
        name = _TRITON_NAMES.get(code, code.value)
        error = self._pb_utils.TritonError(message, getattr(self._pb_utils.TritonError, name))
        response = self._pb_utils.InferenceResponse(output_tensors=[], error=error)
        self._sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has gone."""
        return bool(self._sender.is_cancelled())


def trace_context_of(request: Any) -> dict[str, str] | None:
    """Return the context (W3C ``traceparent``) of a Triton request that is traced in mode
    ``opentelemetry``; None for any other.
    """
    context = request.trace().get_context()
    return json.loads(context) if context else None


def parameters_of(request: Any) -> dict[str, Any]:
    """Return a Triton request's parameters; over HTTP these are all keys of a body that are no
    input.
    """
    text = request.parameters()
    return json.loads(text) if text else {}


def inputs_of(request: Any) -> dict[str, Array]:
    """Return a Triton request's input tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
