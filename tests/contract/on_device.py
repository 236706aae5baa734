"""Tiny engines on another device, under the same scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.contract import deployment
from tests.contract.scenarios import BUSY, MIXED, plain_text
from tests.fakes.llamas import torch_engine


@contextmanager
def engines_on(device: torch.device) -> Iterator[None]:
    """Put every engine made of weights there; what is compared with has been made on the host
    before.
    """
    for ask in (*BUSY.asks, *MIXED.asks):
        plain_text(ask)

    def put(name, config, weights, **options):
        there = {key: weight.to(device) for key, weight in weights.items()}
        return torch_engine(name, config, there, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "make_engine", put)
        patch.setattr(deployment, "poison", lambda engine, sequences: None)
        yield
