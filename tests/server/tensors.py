"""Requests of tensors to a running service, by tritonclient."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from backend.triton_adapter.fields import MODELS, NUMPY_TYPES
from tests.server.harness import Service

DTYPES = {field.name: field.dtype for model in MODELS for field in model.inputs}
END = {"end_id": [[-1]]}


def tensors(inputs: dict[str, Any], kind: Any = grpcclient) -> list[Any]:
    """Return tritonclient's inputs for nested lists that begin with the batch dimension."""
    made = []
    for name, value in inputs.items():
        array = np.array(value, dtype=NUMPY_TYPES[DTYPES[name]])
        made.append(
            kind.InferInput(
                name, array.shape, "BYTES" if DTYPES[name] == "STRING" else DTYPES[name]
            )
        )
        made[-1].set_data_from_numpy(array)
    return made


Replies = queue.SimpleQueue[tuple[Any, Any]]


class Client:
    """One gRPC stream."""

    def __init__(self, client: Any, replies: Replies) -> None:
        self._client, self._replies = client, replies

    def send(
        self, model: str, request_id: str = "", timeout: int | None = None, **inputs: Any
    ) -> None:
        self._client.async_stream_infer(
            model,
            tensors(inputs),
            request_id=request_id,
            enable_empty_final_response=True,
            timeout=timeout,
        )

    def collect(self, request_id: str = "") -> list[dict[str, Any]]:
        """Return the responses of a request up to its final one, those of others put back."""
        responses, others = [], []
        while True:
            result, error = self._replies.get(timeout=30)
            if error is not None:
                raise error
            response = result.get_response()
            if response.id != request_id:
                others.append((result, error))
                continue
            if response.outputs:
                responses.append(
                    {output.name: result.as_numpy(output.name) for output in response.outputs}
                )
            if response.parameters["triton_final_response"].bool_param:
                for each in others:
                    self._replies.put(each)
                return responses

    def ask(self, model: str, **inputs: Any) -> list[dict[str, Any]]:
        self.send(model, **inputs)
        return self.collect()


@contextmanager
def connected(
    service: Service, keepalive: grpcclient.KeepAliveOptions | None = None
) -> Iterator[Client]:
    """Open a stream to a service."""
    replies: Replies = queue.SimpleQueue()
    address = f"127.0.0.1:{service.grpc}"
    with grpcclient.InferenceServerClient(address, keepalive_options=keepalive) as made:
        made.start_stream(lambda result, error: replies.put((result, error)))
        try:
            yield Client(made, replies)
        finally:
            made.stop_stream()


def token_request(prompt: str, length: int, **more: Any) -> dict[str, Any]:
    """Return the inputs of a request of token ids that has exactly ``length`` new ones."""
    ids = list(prompt.encode())
    return {
        "input_ids": [ids],
        "input_lengths": [[len(ids)]],
        "request_output_len": [[length]],
        **END,
        **more,
    }


def ids_of(responses: list[dict[str, Any]]) -> list[int]:
    """Return the token ids of all responses."""
    return [token for response in responses for token in response["output_ids"][0, 0].tolist()]
