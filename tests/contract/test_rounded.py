"""Matrices in int8 and in fp16: greedy texts are those of the same engine's plain decoding, for any
drafts, trees and batches.

In int8 a row's product is the same to the bit in any batch; in fp16 it differs as fp32 does, far
less than these texts' tokens are apart.
"""

from dataclasses import replace

import pytest
import torch

from backend.engines.torch import fp16, int8, llama
from backend.engines.torch.engine import TorchEngine
from tests.contract.deployment import Deployment, Scripted, tiny_engine
from tests.contract.scenarios import BUSY, PROMPTS, greedily, serve

KINDS = [
    pytest.param(
        "int8",
        marks=pytest.mark.skipif(
            not int8._exact(), reason="no exact int8 products on this processor"
        ),
    ),
    pytest.param(
        "fp16",
        marks=pytest.mark.skipif(not fp16.supported(), reason="no fp16 matrices on this processor"),
    ),
]


@pytest.fixture(params=KINDS)
def rounded(monkeypatch, request):
    """Every target's matrices are rounded (drafts' are not)."""
    from_weights = TorchEngine.from_weights
    monkeypatch.setattr(llama, "SMALL_WEIGHT", 0)

    def made(name, config, weights, **options):
        return from_weights(
            name, config, weights, **options, matrices=request.param if name == "target" else ""
        )

    monkeypatch.setattr(TorchEngine, "from_weights", made)


def alone(prompt, max_tokens):
    deployment = Deployment(tiny_engine(), [], Scripted())
    session = deployment.submit(prompt, max_tokens)
    deployment.run()
    return session.sequence.tokens


@pytest.mark.parametrize("attention", ["ragged", "tiled", "graphs"])
def test_greedy_texts_are_those_of_its_own_plain_decoding(rounded, attention):
    scenario, _, sessions = serve(replace(greedily(BUSY), attention=attention))
    for ask, session in zip(scenario.asks, sessions, strict=True):
        expected, found = alone(PROMPTS[ask.prompt], ask.max_tokens), session.sequence.tokens
        assert found == (expected[: len(found)] if session.sink.cancelled else expected)


def test_it_is_another_model_than_the_one_it_was_made_of(rounded):
    plain = tiny_engine("plain")._model
    assert not torch.equal(
        plain._head(torch.eye(16, dtype=torch.float64)),
        tiny_engine()._model._head(torch.eye(16, dtype=torch.float64)),
    )
