"""``pb_utils`` objects made and read: the only place that builds Triton responses."""

from __future__ import annotations

import json
from typing import Any

from backend.request import ErrorCode
from backend.triton_adapter.codec import Array

_TRITON_NAMES = {ErrorCode.INVALID_ARGUMENT: "INVALID_ARG", ErrorCode.UNIMPLEMENTED: "UNSUPPORTED"}
"""Where ``TritonError`` names a code otherwise than gRPC does."""


class Responder:
    """Sends one Triton request's responses; ``pb_utils`` is the module that exists in Triton's stubs only."""

    __slots__ = ("_pb_utils", "_sender")

    def __init__(self, pb_utils: Any, sender: Any) -> None:
        self._pb_utils = pb_utils
        self._sender = sender

    def send(self, outputs: dict[str, Array], *, final: bool) -> None:
        """Send outputs, the last ones together with the final flag."""
        tensors = [self._pb_utils.Tensor(name, array) for name, array in outputs.items()]
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(self._pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send the error that ends the request."""
        name = _TRITON_NAMES.get(code, code.value)
        error = self._pb_utils.TritonError(message, getattr(self._pb_utils.TritonError, name))
        response = self._pb_utils.InferenceResponse(output_tensors=[], error=error)
        self._sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has gone."""
        return bool(self._sender.is_cancelled())


def trace_context_of(request: Any) -> dict[str, str] | None:
    """Return the context (W3C ``traceparent``) of a Triton request that is traced in mode ``opentelemetry``; None for any other."""
    context = request.trace().get_context()
    return json.loads(context) if context else None


def inputs_of(request: Any) -> dict[str, Array]:
    """Return a Triton request's input tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
