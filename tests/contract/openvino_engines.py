"""OpenVINO's engines in the place of torch's, under the same scenarios."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openvino
import pytest
import torch

from backend.engines.models.spec import PlainLlama
from backend.engines.openvino import parts
from backend.engines.openvino.conversion import convert
from backend.engines.openvino.converted import read
from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.openvino.marks import AttentionMark
from backend.engines.openvino.passes import narrow, side_by_side
from tests.contract import deployment, scenarios
from tests.contract.deployment import VOCAB
from tests.contract.scenarios import Scenario, plain_text
from tests.fakes.llamas import in_modules, llama

_GRAPHS = tempfile.TemporaryDirectory(prefix="graphs-")


def heads_of_sixteen(vocab: int = VOCAB, *, layers: int = 2) -> PlainLlama:
    """OpenVINO's attention has no heads of 4, and perhaps none of 8; sums of whole tiles keep their
    bits on AMX.
    """
    return llama(vocab, 64, 96, layers, 4, 2, 16)


def openvino_engine(
    name: str,
    config: PlainLlama,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: str = "fp32",
    taps: Sequence[int] = (),
    **sizes: Any,
) -> OpenvinoEngine:
    """Return an engine of weights in memory, whose conversion is kept for others of the same."""
    wide = {key: weight.float() for key, weight in weights.items()}
    digest = hashlib.sha256(repr((config, dtype, parts.SMALL_WEIGHT, [*taps])).encode())
    for weight in wide.values():
        digest.update(weight.numpy().tobytes())
    file = Path(_GRAPHS.name) / f"{digest.hexdigest()}.xml"
    if not file.exists():
        graph = convert(in_modules(config, wide), taps)
        side_by_side(graph)
        narrow(graph, dtype)
        graph.validate_nodes_and_infer_types()
        openvino.save_model(graph, file, compress_to_fp16=False)
        AttentionMark.alive.clear()
    return OpenvinoEngine(name, read(file), dtype=dtype, taps=taps, **sizes)


@contextmanager
def with_larger_heads() -> Iterator[None]:
    """Make the tiny models such that OpenVINO runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "tiny_config", heads_of_sixteen)
        patch.setattr(scenarios, "tiny_config", heads_of_sixteen)
        patch.setattr(scenarios, "reference", cache(scenarios.reference.__wrapped__))
        yield


@contextmanager
def on_openvino(
    *scenarios: Scenario, invariant: bool = True, dtype: str = "fp32", threads: int = 1
) -> Iterator[None]:
    """Make every engine of weights one of OpenVINO; what is compared with has been made on torch,
    in fp64, before.
    """
    for scenario in scenarios:
        for ask in scenario.asks:
            plain_text(ask)

    def made(name, config, weights, **sizes):
        exact = invariant and name == "target"
        sizes |= {"invariant": exact, "threads": threads}
        return openvino_engine(name, config, weights, dtype=dtype, **sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "make_engine", made)
        yield
