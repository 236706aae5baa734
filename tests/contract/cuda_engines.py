"""The CUDA engine, on a CPU in fp64, in the place of torch's, under the same scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from backend.engines.cuda.engine import CudaEngine
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.cuda.stream import Stream
from backend.engines.models.spec import PlainLlama
from backend.engines.port import Engine
from backend.engines.weights import Weights
from tests.contract import deployment
from tests.contract.checks import fresh
from tests.contract.scenarios import Scenario, plain_text
from tests.fakes.llamas import in_modules


@contextmanager
def on_cuda_engine(
    *scenarios: Scenario, padded: bool = False, lookahead: bool = False
) -> Iterator[None]:
    """Make every engine of weights a CUDA engine; what is compared with has been made on
    torch before. ``padded`` runs passes at the sizes of graphs;
    with ``lookahead`` the target decides on its device.
    """
    for scenario in scenarios:
        for ask in scenario.asks:
            plain_text(ask)
    fresh()

    def made(name: str, config: PlainLlama, weights: Weights, **sizes: Any) -> Engine:
        sizes.pop("attention", None)
        with torch.inference_mode(False):
            lm = in_modules(config, weights)
        looks_ahead = lookahead and name == "target"
        kind = partial(LookaheadEngine, sequences=6) if looks_ahead else CudaEngine
        engine = kind(name, lm, vocab_size=config.vocab_size, **sizes)
        engine.model.graphs.captures = padded
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "capture", lambda _, run: run)
        patch.setattr(deployment, "make_engine", made)
        yield
