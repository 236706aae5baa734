"""The exactness suite on the TensorRT-LLM adapter, over the fake executor: in order, and with answers late, out of order, prefixes lost."""

import pytest

from tests.contract import checks, scenarios
from tests.contract.fake_executor import Behaviour
from tests.contract.trtllm_deployment import ALL_GREEDY, serve_with_trtllm

BEHAVIOURS = {"in order": Behaviour, "late and out of order": lambda: Behaviour(seed=3, late=0.4, shuffled=True, evicts=0.2)}
SUITE = (
    checks.greedy_texts_are_those_of_plain_decoding,
    checks.texts_with_options_are_those_of_plain_decoding,
    checks.drafts_propose_what_they_would_decode,
    checks.an_always_wrong_draft_gives_one_token_a_step,
    checks.an_oracle_gives_k_plus_one_tokens_a_step,
    checks.nothing_is_committed_beyond_an_end,
)
"""Without the checks that look into KV (the executor's own), and that sampled texts are the same
under any plan: the executor draws by numbers of its own.
"""

LAWS = (
    checks.texts_sampled_with_a_draft_s_law_follow_the_target_s,
    checks.texts_sampled_with_a_reduced_law_follow_the_target_s,
    checks.texts_sampled_with_a_shortlist_follow_the_target_s_law,
    checks.texts_sampled_with_lookup_follow_the_target_s_law,
)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_it_holds_that(check, behaviour, monkeypatch):
    serve_with_trtllm(monkeypatch, BEHAVIOURS[behaviour])
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", LAWS, ids=lambda check: check.__name__)
def test_it_holds_in_law_that(check, monkeypatch):
    serve_with_trtllm(monkeypatch)
    check()


def test_sampled_texts_with_every_option_follow_the_targets_law(monkeypatch):
    serve_with_trtllm(monkeypatch)
    checks.texts_follow_the_target_s_law(checks.OPTIONS)


def test_log_probabilities_are_those_of_the_text(monkeypatch):
    """The decoder gives none behind a verification: they are made of its logits, which are fp32."""
    serve_with_trtllm(monkeypatch)
    checks.log_probs_are_those_of_the_text(scenarios.MIXED, tolerance=1e-5)


def test_a_copy_of_the_target_is_never_rejected(monkeypatch):
    """Where texts are greedy, for so are its proposals. Without a least length: a turn is cut
    where ends are no longer forbidden.
    """
    serve_with_trtllm(monkeypatch)
    monkeypatch.setattr(checks, "MIXED", ALL_GREEDY)
    checks.a_copy_of_the_target_is_never_rejected()


@pytest.mark.parametrize(
    "check",
    [
        checks.greedy_texts_are_those_of_plain_decoding,
        checks.texts_with_options_are_those_of_plain_decoding,
        lambda: checks.log_probs_are_those_of_the_text(scenarios.MIXED, tolerance=1e-5),
        lambda: checks.texts_follow_the_target_s_law(checks.OPTIONS, rounds=1_000),
    ],
    ids=["greedy", "options", "log-probabilities", "law"],
)
def test_free_runs_of_several_tokens_change_no_text_and_no_law(check, monkeypatch):
    serve_with_trtllm(monkeypatch, free_run_tokens=3)
    check()
