"""The exactness suite on the TensorRT-LLM adapter, over the fake executor: in order, and with answers late, out of order, prefixes lost."""

from functools import partial

import pytest

from tests.contract import checks, scenarios
from tests.contract.fake_executor import Behaviour
from tests.contract.trtllm_deployment import BUSY, MIXED, NO_LEAST, serve_with_trtllm

BEHAVIOURS = {"in order": Behaviour, "late and out of order": lambda: Behaviour(seed=3, late=0.4, shuffled=True, evicts=0.2)}
TEXTS = {
    "greedy texts": partial(checks.exact, BUSY, checks.texts, checks.counts),
    "texts with options": partial(checks.exact, MIXED, checks.texts, checks.counts),
}
LOG_PROBS = partial(checks.log_probs, tolerance=1e-5)
"""The decoder gives none behind a verification: they are made of its logits, which are fp32."""

SUITE = TEXTS | {
    "proposals": partial(checks.exact, BUSY, checks.proposals),
    "an always wrong draft": checks.an_always_wrong_draft_gives_one_token_a_step,
    "an oracle": checks.an_oracle_gives_k_plus_one_tokens_a_step,
    "ends": checks.nothing_is_committed_beyond_an_end,
}
"""Without the checks that look into KV (the executor's own) and texts of sampled requests."""


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("name", SUITE)
def test_it_holds_of(name, behaviour, monkeypatch):
    serve_with_trtllm(monkeypatch, BEHAVIOURS[behaviour])
    SUITE[name]()


@pytest.mark.slow
@pytest.mark.parametrize("draft", checks.LAW_DRAFTS)
def test_each_draft_leaves_the_target_s_law(draft, monkeypatch):
    serve_with_trtllm(monkeypatch)
    checks.texts_follow_the_target_s_law(checks.WIDE, [draft])


def test_sampled_texts_with_every_option_follow_the_targets_law(monkeypatch):
    serve_with_trtllm(monkeypatch)
    checks.texts_follow_the_target_s_law(checks.OPTIONS)


def test_log_probabilities_are_those_of_the_text(monkeypatch):
    serve_with_trtllm(monkeypatch)
    checks.exact(scenarios.MIXED, LOG_PROBS)


def test_a_copy_of_the_target_is_never_rejected(monkeypatch):
    serve_with_trtllm(monkeypatch)
    checks.a_copy_of_the_target_is_rejected_for_its_tail_only(NO_LEAST)


@pytest.mark.parametrize(
    "check",
    [
        *TEXTS.values(),
        partial(checks.exact, scenarios.MIXED, LOG_PROBS),
        partial(checks.texts_follow_the_target_s_law, checks.OPTIONS, rounds=1_000),
    ],
    ids=[*TEXTS, "log-probabilities", "law"],
)
def test_free_runs_of_several_tokens_change_no_text_and_no_law(check, monkeypatch):
    serve_with_trtllm(monkeypatch, free_run_tokens=3)
    check()
