"""A head on OpenVINO's kernels: a third of torch's time on a CPU, in int8."""

from __future__ import annotations

import numpy as np
import torch
from openvino import InferRequest, Model, Output, Tensor, Type, opset13

from backend.engines.head.network import HeadNetwork
from backend.engines.openvino.paged_attention import check_version
from backend.engines.openvino.parts import (
    compiled,
    ints,
    matrix,
    named,
    normed,
    parameter,
)


class OpenvinoHead:
    """A network whose matrices are in int8; ``precision`` is that of activations."""

    def __init__(
        self, network: HeadNetwork, rows: torch.Tensor, *, precision: str, threads: int
    ) -> None:
        check_version()
        graphs = _begin(network), _step(network, rows)
        self._requests = [
            compiled(graph, precision, threads).create_infer_request() for graph in graphs
        ]

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """Return states of features (``Head``)."""
        return _run(self._requests[0], features=features.flatten(1))["state"]

    def step(
        self, state: torch.Tensor, token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Move states on by tokens (``Head``)."""
        found = _run(self._requests[1], before=state, token=token)
        return found["state"], found["vectors"], found["logits"]


def _run(request: InferRequest, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a request. Its outputs are its own memory until it runs again, hence the copies. With one
    thread an exception in a graph is swallowed, and what was there before is there still: no
    numbers.
    """
    for name, tensor in inputs.items():
        request.set_tensor(name, Tensor(tensor.contiguous().numpy()))
    outputs = request.model_outputs
    for port in outputs:
        array = request.get_tensor(port).data
        array[:, :1] = np.nan
    request.infer()
    found = {port.get_any_name(): request.get_tensor(port).data.copy() for port in outputs}
    for name, array in found.items():
        if np.isnan(array[:, 0]).any():
            raise RuntimeError(f"OpenVINO's pass of a head left no {name}")
    return {name: torch.from_numpy(array) for name, array in found.items()}


def _begin(network: HeadNetwork) -> Model:
    config = network.config
    taps, hidden = len(config.layers), config.hidden_size
    features = parameter("features", [-1, taps * hidden], Type.f32)
    apart = opset13.reshape(features, ints([-1, taps, hidden]), False)
    rows = normed(apart.output(0), network.features_norm, config.rms_norm_eps)
    flat = opset13.reshape(rows, ints([-1, taps * hidden]), False)
    state = opset13.matmul(flat, matrix(network.join.weight, rounded=True), False, True)
    return named({"state": state.output(0)}, [features], "begin")


def _step(network: HeadNetwork, rows: torch.Tensor) -> Model:
    config, eps = network.config, network.config.rms_norm_eps
    before, token = (parameter(n, [-1, config.hidden_size], Type.f32) for n in ("before", "token"))

    def product(values: Output, weight: torch.Tensor) -> Output:
        return opset13.matmul(values, matrix(weight, rounded=True), False, True).output(0)

    read = [
        normed(before.output(0), network.state_norm, eps),
        normed(token.output(0), network.token_norm, eps),
    ]
    state = opset13.add(before, product(opset13.concat(read, 1).output(0), network.mix.weight))
    both = product(normed(state.output(0), network.mlp_norm, eps), network.gate_up.weight)
    gate, up = opset13.variadic_split(
        both, ints(-1), ints([config.intermediate_size] * 2)
    ).outputs()
    inner = opset13.multiply(opset13.swish(gate), up)
    state = opset13.add(state, product(inner.output(0), network.down.weight))
    vectors = normed(state.output(0), network.norm, eps)
    outputs = {"state": state.output(0), "vectors": vectors.output(0)}
    outputs["logits"] = product(vectors.output(0), rows)
    return named(outputs, [before, token], "step")
