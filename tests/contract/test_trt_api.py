"""Calls of the networks to the library, against the recorded interface of TensorRT 10.13; the
layers are made for real, by TensorRT-RTX.
"""

import json
from pathlib import Path

import pytest
import torch

from backend.engines.trt_graph.inputs import DRAWN, GREEDY, LOGITS
from engines_build.trt_graph.graph import BF16
from engines_build.trt_graph.layers import TrtGraph
from engines_build.trt_graph.library import Messages
from engines_build.trt_graph.network import StepNetwork, describe
from tests.contract.deployment import tiny_config

library = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

RECORD = json.loads((Path(__file__).parent / "tensorrt_api.json").read_text())
PLAIN = ("Weights", "Permutation")


class Library:
    """The real library; only what is recorded of it may be used."""

    def __getattr__(self, name):
        return getattr(library, name) if name in PLAIN else Members(name)


class Members:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, member):
        assert member in RECORD["enums"][self._name], f"{self._name}.{member}"
        return getattr(getattr(library, self._name), member)


class Network:
    def __init__(self, network):
        self._network = network

    def __getattr__(self, name):
        least, most = RECORD["network"][name]

        def call(*arguments):
            assert least <= len(arguments) <= most, f"{name} with {len(arguments)} arguments"
            made = getattr(self._network, name)(*arguments)
            return Layer(made) if isinstance(made, library.ILayer) else made

        return call


class Layer:
    def __init__(self, layer):
        object.__setattr__(self, "_layer", layer)

    def _checked(self, name):
        kind = type(self._layer).__name__
        assert name in RECORD["attributes"]["ILayer"] + RECORD["attributes"].get(kind, []), (
            f"{kind}.{name}"
        )

    def __getattr__(self, name):
        self._checked(name)
        return getattr(self._layer, name)

    def __setattr__(self, name, value):
        self._checked(name)
        setattr(self._layer, name, value)


def described(step, weights, *, native=False):
    messages = Messages(library)
    builder = library.Builder(messages.logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    graph = TrtGraph(Library(), Network(network), messages, weights, native=native)
    describe(graph, step)
    return network.num_layers


def quantised(weights):
    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scales = weight.float().abs().amax(1) / 127
            found[name] = (
                (weight.float() / scales[:, None]).round().to(torch.int8),
                scales.bfloat16(),
            )
    return found


@pytest.mark.parametrize("network", [LOGITS, GREEDY, DRAWN])
def test_a_step_asks_for_nothing_that_tensorrt_10_has_not(network):
    weights = {
        name: torch.randn(shape).bfloat16() for name, shape in tiny_config().shapes().items()
    }
    step = StepNetwork(tiny_config(), BF16, 160, network)
    assert described(step, weights) > 100
    assert described(step, quantised(weights)) > 100


def test_the_native_attention_layer_is_none_of_tensorrt_10():
    weights = {
        name: torch.randn(shape).bfloat16() for name, shape in tiny_config().shapes().items()
    }
    with pytest.raises(KeyError, match="Attention"):
        described(StepNetwork(tiny_config(), BF16, 160), weights, native=True)
