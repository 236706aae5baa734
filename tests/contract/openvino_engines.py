"""OpenVINO's engines in the place of torch's, under the same scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from backend.engines.models.spec import PlainLlama
from backend.engines.openvino.engine import OpenvinoEngine
from tests.contract import deployment, scenarios
from tests.contract.deployment import VOCAB
from tests.contract.scenarios import Scenario, plain_text
from tests.fakes.llamas import llama


def heads_of_sixteen(vocab: int = VOCAB, *, layers: int = 2) -> PlainLlama:
    """OpenVINO's attention has no heads of 4, and perhaps none of 8; sums of whole tiles keep their
    bits on AMX.
    """
    return llama(vocab, 64, 96, layers, 4, 2, 16)


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
        narrow = {k: w.float() if w.is_floating_point() else w for k, w in weights.items()}
        exact = invariant and name == "target"
        return OpenvinoEngine.from_weights(
            name, config, narrow, invariant=exact, dtype=dtype, threads=threads, **sizes
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "make_engine", made)
        yield
