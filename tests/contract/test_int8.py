"""Matrices in int8: greedy texts are those of the same engine's plain decoding, for any drafts, trees and batches."""

from dataclasses import replace

import pytest
import torch

from backend.engines import int8
from backend.engines.torch_engine import TorchEngine
from tests.contract.deployment import Deployment, Scripted, tiny_engine
from tests.contract.scenarios import BUSY, PROMPTS, SHORT, TREES, serve

pytestmark = pytest.mark.skipif(not int8._exact(), reason="no exact int8 products on this processor")


@pytest.fixture
def rounded(monkeypatch):
    """Every target is in int8 (drafts are not)."""
    from_weights = TorchEngine.from_weights

    def made(name, config, weights, **options):
        return from_weights(name, config, weights, **options, int8=name == "target")

    monkeypatch.setattr(TorchEngine, "from_weights", made)


def alone(prompt, max_tokens):
    deployment = Deployment(tiny_engine(), [], Scripted())
    session = deployment.submit(prompt, max_tokens)
    deployment.run()
    return session.sequence.tokens


@pytest.mark.parametrize("attention", ["ragged", "tiled", "graphs"])
@pytest.mark.parametrize("scenario", [BUSY, TREES], ids=["chains", "trees"])
def test_greedy_texts_are_those_of_its_own_plain_decoding(rounded, scenario, attention):
    texts = {number: alone(PROMPTS[number], 16) for number in SHORT}
    _, sessions = serve(replace(scenario, attention=attention))
    for ask, session in zip(scenario.asks, sessions, strict=True):
        found = session.sequence.tokens
        assert found == (texts[ask.prompt][: len(found)] if session.sink.cancelled else texts[ask.prompt])


def test_it_is_another_model_than_the_one_it_was_made_of(rounded):
    plain = tiny_engine("plain")._model
    assert not torch.equal(plain._head(torch.eye(16, dtype=torch.float64)), tiny_engine()._model._head(torch.eye(16, dtype=torch.float64)))
