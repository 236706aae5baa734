"""Pre-emption: KV that is given back, poisoned, and later run again through the real engine, changes no token. (The exactness suite draws
small pools too, and checks log-probabilities and KV.)"""

from dataclasses import replace

import pytest

from backend.engines.torch_engine import TorchEngine
from backend.request import SamplingParams
from tests.contract.scenarios import BUSY, CROSSED, Ask, Scenario, plain_text, serve

LONG = tuple(Ask(n, 40, arrival=n // 2) for n in range(5))
CRAMPED = Scenario(LONG, BUSY.script, kv_blocks=7)
"""Requests that each need three to five of the seven blocks in the end, and fewer at admission."""

OPTIONS = [sampling for sampling in CROSSED if (sampling.greedy or sampling.coupled) and not sampling.end_ids]
CRAMPED_WITH_OPTIONS = replace(CRAMPED, asks=tuple(replace(ask, sampling=s) for ask, s in zip(LONG, OPTIONS, strict=True)))
PLAIN = replace(CRAMPED, asks=tuple(replace(long, sampling=SamplingParams(0.9, seed=long.prompt)) for long in LONG), script=((-1, 0),))


def tokens_and_preemptions(scenario):
    deployment, sessions = serve(scenario)
    return [session.sequence.tokens for session in sessions], deployment.counters().get(("spindle_preemptions_total",), 0)


@pytest.mark.parametrize("scenario", [CRAMPED, CRAMPED_WITH_OPTIONS])
def test_a_resumed_request_has_the_tokens_of_plain_decoding_alone(scenario):
    tokens, preemptions = tokens_and_preemptions(scenario)
    assert tokens == [plain_text(ask) for ask in scenario.asks]
    assert preemptions >= 1


def test_without_speculation_even_what_is_drawn_anew_in_every_step_stays_the_same():
    ample, none = tokens_and_preemptions(replace(PLAIN, kv_blocks=64))
    tokens, preemptions = tokens_and_preemptions(PLAIN)
    assert tokens == ample
    assert preemptions >= 1 > none


def test_a_request_that_goes_on_without_its_kv_is_noticed(monkeypatch):
    """The test of the test: engines that are not told of a lost block table."""
    monkeypatch.setattr(TorchEngine, "cancel", lambda self, ids: None)
    monkeypatch.setattr("backend.engines.kv_caches.Cache.grew_into", lambda self, blocks: True)
    tokens, _ = tokens_and_preemptions(CRAMPED)
    assert tokens != [plain_text(ask) for ask in LONG]
