"""Compile a step's network with TensorRT-RTX (which needs no GPU) or TensorRT, for every shape that
a deployment runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from engines_build.trt_graph.layers import TrtGraph
from engines_build.trt_graph.library import Messages, has_attention
from engines_build.trt_graph.network import StepNetwork, describe

MOST_SLOTS = 1 << 24
"""Token places of a KV pool that an engine is compiled for; the memory decides."""


USUAL_BATCH = 4
"""Sequences of the pass that kernels are chosen for. With 16, and distributions of 49,152 columns,
TensorRT-RTX 1.7 takes minutes to compile.
"""


@dataclass(frozen=True, slots=True)
class Profile:
    """The largest shapes of a kind of pass."""

    batch: int
    """Sequences."""
    queries: int
    """Rows of each sequence that run."""
    past: int
    """Keys of each sequence before them."""
    rows: int
    """Rows of each sequence that are decided."""

    def sizes(self, name: str) -> tuple[int, int, int]:
        """Return the least, usual and largest size of a dimension."""
        if name == "slots":
            return 1, MOST_SLOTS // 64, MOST_SLOTS
        if name == "total":
            return 2, self._usual(self.past) + self.queries, self.past + self.queries
        largest: int = getattr(self, name)
        usual = {"batch": min(USUAL_BATCH, largest), "past": self._usual(self.past)}
        return 1, usual.get(name, largest), largest

    @staticmethod
    def _usual(largest: int) -> int:
        return max(1, largest // 4)


@dataclass(frozen=True, slots=True)
class SerialisedEngine:
    """A serialised engine, and what it took to make."""

    blob: bytes
    layers: int
    seconds: float


def compile_step(
    library: ModuleType,
    step: StepNetwork,
    weights: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]],  # [out, in], [n]
    profiles: Iterable[Profile],
    *,
    shared: bool = True,
    native: bool | None = None,
) -> SerialisedEngine:
    """Compile. ``shared`` weights are inputs of the engine, others are in it. (Stripped plans, to
    be refitted later, need a GPU to build.)

    ``native`` says whether the library's attention layer is used (None: where it has one). Raises
    TrtError in the library's words.
    """
    begin, messages = time.monotonic(), Messages(library)
    builder = library.Builder(messages.logger)
    typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    graph = TrtGraph(
        library,
        network,
        messages,
        weights,
        shared=shared,
        native=has_attention(library) if native is None else native,
    )
    describe(graph, step)
    config = builder.create_builder_config()
    for profile in profiles:
        if (
            config.add_optimization_profile(
                _shapes(builder.create_optimization_profile(), network, profile)
            )
            < 0
        ):
            raise messages.error(f"profile {profile} of {step.network}")
    blob = builder.build_serialized_network(network, config)
    if blob is None:
        raise messages.error(f"engine {step.network}")
    return SerialisedEngine(bytes(blob), network.num_layers, time.monotonic() - begin)


def _shapes(shapes: Any, network: Any, profile: Profile) -> Any:
    """Fill in the sizes of every input that has dimensions that vary."""
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        if -1 in tuple(tensor.shape):
            named = [
                (size,) * 3 if size >= 0 else profile.sizes(tensor.get_dimension_name(axis))
                for axis, size in enumerate(tuple(tensor.shape))
            ]
            shapes.set_shape(tensor.name, *zip(*named, strict=True))
    return shapes
