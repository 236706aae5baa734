"""Tiny engines on another device, under the same scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from backend.engines.torch.engine import TorchEngine
from tests.contract import deployment
from tests.contract.scenarios import BUSY, MIXED, plain_text


@contextmanager
def engines_on(device: torch.device) -> Iterator[None]:
    """Put every engine made of weights there; what is compared with has been made on the host
    before.
    """
    for ask in (*BUSY.asks, *MIXED.asks):
        plain_text(ask)
    from_weights = TorchEngine.from_weights

    def put(name, config, weights, **options):
        return from_weights(
            name, config, {key: weight.to(device) for key, weight in weights.items()}, **options
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "from_weights", put)
        patch.setattr(deployment, "poison", lambda engine, sequences: None)
        yield
