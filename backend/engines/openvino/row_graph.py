"""A graph of draft heads, run on rows."""

from __future__ import annotations

import math

import torch
from openvino import Model, Tensor

from backend.engines.openvino.parts import compiled


class RowGraph:
    """A compiled graph whose inputs and outputs, all [rows, width], lie in our memory."""

    def __init__(self, graph: Model, precision: str, threads: int) -> None:
        self._request = compiled(graph, precision, threads).create_infer_request()
        self._widths = [
            {port.get_any_name(): port.get_partial_shape()[1].get_length() for port in ports}
            for ports in (self._request.model_inputs, self._request.model_outputs)
        ]
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._rows = 0

    def run(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs by name, until the next call. Raises RuntimeError where there are
        none: with one thread an exception within a graph is swallowed.
        """
        rows = len(next(iter(inputs.values())))
        if rows != self._rows:
            self._inputs, self._outputs = (self._bound(rows, widths) for widths in self._widths)
            self._rows = rows
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        for output in self._outputs.values():
            output[:, 0] = math.nan
        self._request.infer()
        for name, output in self._outputs.items():
            if output[:, 0].isnan().any():
                raise RuntimeError(f"OpenVINO's pass of a draft head left no {name}")
        return self._outputs

    def _bound(self, rows: int, widths: dict[str, int]) -> dict[str, torch.Tensor]:
        """Return memory for this many rows, which the request uses from now on."""
        found = {name: torch.empty(rows, width) for name, width in widths.items()}
        for name, tensor in found.items():
            self._request.set_tensor(name, Tensor(tensor.numpy(), shared_memory=True))
        return found
