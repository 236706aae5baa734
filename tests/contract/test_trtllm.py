"""The exactness suite on the TensorRT-LLM adapter, over the fake executor: in order, and with late
answers, out of order, and prefixes lost.

Without what looks into KV (the executor's own), and that sampled texts are the same under any plan:
the executor draws by numbers of its own.
"""

from dataclasses import replace

import pytest

from backend.engines.port import EngineLostError
from tests.contract import checks
from tests.contract.deployment import Deployment, Scripted, tiny_engine
from tests.contract.fake_executor import Behaviour
from tests.contract.scenarios import BUSY, MIXED, PROMPTS, Scenario
from tests.contract.trtllm_deployment import serve_with_trtllm, trtllm_engine

BEHAVIOURS = {
    "in order": Behaviour,
    "late and out of order": lambda: Behaviour(seed=3, late=0.4, shuffled=True, evicts=0.2),
}


def greedy(scenario: Scenario) -> Scenario:
    """The same requests, all greedy."""
    samplings = [replace(ask.sampling, temperature=0.0) for ask in scenario.asks]
    asks = zip(scenario.asks, samplings, strict=True)
    return replace(scenario, asks=tuple(replace(ask, sampling=sampling) for ask, sampling in asks))


def log_probs(served):
    """They are made of the executor's logits, which are fp32."""
    checks.log_probs(served, tolerance=1e-5)


GREEDY = {"busy": greedy(BUSY), "options": greedy(MIXED)}
FORETOLD = (
    checks.an_always_wrong_draft_gives_one_token_a_step,
    checks.an_oracle_gives_k_plus_one_tokens_a_step,
    checks.nothing_is_committed_beyond_an_end,
)
DEPLOYMENTS = {
    "all drafts": lambda: checks.texts_follow_the_target_s_distribution(checks.OPTIONS),
    "a draft": lambda: checks.texts_follow_the_target_s_distribution(checks.WIDE, ["other"], 3_000),
    "a reduced distribution": lambda: checks.texts_follow_the_target_s_distribution(
        checks.SHARP, ["other", "fp32"]
    ),
    "lookup": lambda: checks.texts_follow_the_target_s_distribution(checks.WIDE, ["lookup"]),
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("scenario", GREEDY)
def test_greedy_texts_are_exact(scenario, behaviour, monkeypatch):
    serve_with_trtllm(monkeypatch, BEHAVIOURS[behaviour])
    checks.exact(GREEDY[scenario], checks.texts, log_probs, checks.proposals)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("check", FORETOLD, ids=lambda check: check.__name__)
def test_it_holds_that(check, behaviour, monkeypatch):
    serve_with_trtllm(monkeypatch, BEHAVIOURS[behaviour])
    check()


@pytest.mark.slow
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_sampled_texts_follow_the_target_s_distribution(deployment, monkeypatch):
    serve_with_trtllm(monkeypatch)
    DEPLOYMENTS[deployment]()


def test_log_probabilities_are_those_of_sampled_texts(monkeypatch):
    serve_with_trtllm(monkeypatch)
    checks.exact(MIXED, log_probs)


def test_a_copy_of_the_target_is_never_rejected(monkeypatch):
    """Its texts are greedy, for so are its proposals."""
    serve_with_trtllm(monkeypatch)
    checks.a_copy_of_the_target_is_rejected_for_its_tail_only(GREEDY["options"])


def test_a_dead_draft_ends_the_loop_as_a_dead_target_does():
    draft = trtllm_engine(tiny_engine("twin"), target=False, behaviour=Behaviour(dies_at=12))
    target = trtllm_engine(tiny_engine(), target=True)
    deployment = Deployment(target, [draft], Scripted([(0, 3)]))
    deployment.submit(PROMPTS[0], 30)
    with pytest.raises(EngineLostError):
        list(iter(deployment.step, False))
