"""The runtime of compiled networks without TensorRT: the same descriptions, executed by ONNX
Runtime on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backend.engines.models.spec import PlainLlama
from backend.engines.trt_graph.engine import PassShape, TrtGraphEngine
from backend.engines.trt_graph.inputs import Tensors
from backend.engines.weights import Weights
from engines_build.trt_graph.graph import F32, F64
from engines_build.trt_graph.network import StepNetwork, describe
from tests.contract.network_cases import open_session, run
from tests.contract.onnx_graph import OnnxGraph


class OnnxRuntime:
    """Opens a network when it is first run; counts the passes of each in ``ran``."""

    passes: Sequence[PassShape] = (PassShape(4, 6), PassShape(2, 20))

    def __init__(self, config: PlainLlama, weights: Weights, max_positions: int) -> None:
        weights = dict(weights)
        self.device, self.dtype = torch.device("cpu"), weights["model.norm.weight"].dtype
        self.verifies = True
        self.ran: dict[str, int] = {}
        self._config, self._positions, self._weights = config, max_positions, weights
        self._sessions: dict[str, Any] = {}

    def run(self, network: str, tensors: Tensors) -> Tensors:
        batch, queries = tensors["ids"].shape
        assert any(batch <= shapes.batch and queries <= shapes.queries for shapes in self.passes), (
            batch,
            queries,
        )
        if network not in self._sessions:
            self._sessions[network] = self._open(network)
        self.ran[network] = self.ran.get(network, 0) + 1
        return run(self._sessions[network], tensors)

    def _open(self, network: str):
        graph = OnnxGraph({name: weight.numpy() for name, weight in self._weights.items()})
        dtype = F64 if self.dtype == torch.float64 else F32
        describe(graph, StepNetwork(self._config, dtype, self._positions, network))
        return open_session(graph)


def onnx_engine(
    name: str,
    config: PlainLlama,
    weights: Weights,
    *,
    max_context_tokens: int,
    max_draft_tokens: int,
    kv_blocks: int,
    **_,
):
    """An engine over networks that ONNX Runtime executes (``deployment.make_engine``)."""
    runtime = OnnxRuntime(config, weights, max_context_tokens + max_draft_tokens + 1)
    sizes = {
        "kv_blocks": kv_blocks,
        "max_context_tokens": max_context_tokens,
        "max_draft_tokens": max_draft_tokens,
    }
    return TrtGraphEngine(name, config, runtime, **sizes)
