"""The exactness suite of a batch in cohorts: one is verified in a thread of its own while the loop plans and drafts for another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from backend.request import SamplingParams
from policy import Outcome
from tests.contract import checks
from tests.contract.deployment import Deployment
from tests.contract.scenarios import ALIKE, BUSY, CROSSED, MIXED, PROMPTS, TREES, UNEVEN, Ask, Scenario, serve

NUMBERS = (2, 2, 2, 2, 2, 3, 1, 2, 2, 2, 4, 2, 1)
"""Mostly two cohorts that go on; now and then everything is waited for and cut anew."""

COHORTS = replace(BUSY, cohorts=NUMBERS)
FREE = replace(COHORTS, poisons=False)
"""As it runs in earnest: nobody waits for the target's thread."""

LONG = tuple(Ask(n, 40, arrival=n // 2, leaves=9 if n == 3 else None) for n in range(5))
CRAMPED = Scenario(LONG, BUSY.script, kv_blocks=7, cohorts=NUMBERS)
"""Too few blocks: requests are pre-empted."""

IN_FLIGHT = replace(CRAMPED, asks=tuple(replace(ask, arrival=0) for ask in LONG), kv_blocks=8, cohorts=(2,))
"""The one that is pre-empted is being verified."""

LATE = Scenario(tuple(Ask(n % 6, 24, arrival=n, leaves=n + 3 + n % 4 if n % 2 else None) for n in range(14)), BUSY.script, cohorts=(2,))
"""Clients that leave while their cohort is being verified."""


def greedy_texts_of_cohorts_are_those_of_plain_decoding() -> None:
    for scenario in (COHORTS, FREE, LATE, replace(LATE, poisons=False), replace(UNEVEN, pieces=(), cohorts=NUMBERS)):
        checks.texts_are_those_of_plain_decoding(scenario)


def texts_of_trees_in_cohorts_are_those_of_plain_decoding() -> None:
    for poisons in (True, False):
        checks.texts_are_those_of_plain_decoding(replace(TREES, cohorts=NUMBERS, poisons=poisons))


def texts_of_cohorts_with_options_are_those_of_plain_decoding() -> None:
    for poisons in (True, False):
        checks.texts_are_those_of_plain_decoding(replace(MIXED, cohorts=NUMBERS, poisons=poisons))


def log_probs_of_cohorts_are_those_of_the_text() -> None:
    checks.log_probs_are_those_of_the_text(replace(MIXED, cohorts=NUMBERS))


def kv_of_cohorts_is_that_of_a_fresh_prefill() -> None:
    checks.kv_is_that_of_a_fresh_prefill(COHORTS)


def texts_that_begin_alike_in_cohorts_share_kv_and_are_those_of_plain_decoding() -> None:
    checks.texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding(replace(ALIKE, cohorts=NUMBERS))
    checks.texts_are_those_of_plain_decoding(replace(ALIKE, cohorts=(2,), poisons=False))


def texts_of_cohorts_survive_pre_emption() -> None:
    """With and without blocks that others find again, poisoned and in earnest; and some are pre-empted while in flight."""
    in_flight = Counter()

    def watch(deployment: Deployment) -> None:
        forget = deployment.loop._flights.forget

        def noted(sequence_id: int) -> bool:
            found = forget(sequence_id)
            in_flight[found] += 1
            return found

        deployment.loop._flights.forget = noted
        deployment.watchers.clear()

    for scenario in (CRAMPED, IN_FLIGHT):
        for reuse, poisons in ((True, True), (True, False), (False, True), (False, False)):
            deployment, sessions = serve(replace(scenario, reuse=reuse, poisons=poisons), watch)
            checks.texts_are(scenario, sessions)
            assert deployment.counters()["spindle_preemptions_total",] > 0
    assert in_flight[True] > 0


def plan_invariant_texts_of_cohorts_survive_pre_emption() -> None:
    options = [sampling for sampling in CROSSED if (sampling.greedy or sampling.coupled) and not sampling.end_ids]
    asks = tuple(replace(ask, sampling=sampling, leaves=None) for ask, sampling in zip(LONG, options, strict=True))
    checks.texts_are_those_of_plain_decoding(replace(CRAMPED, asks=asks))


def every_row_of_a_cohort_gets_what_was_planned_for_it() -> None:
    """Its own draft and length, once, in the outcome of its own flight; and two cohorts have been in flight."""
    deployment = serve(replace(BUSY, cohorts=NUMBERS, script=((0, 1), (1, 3), (0, 4), (3, 2), (1, 2))))[0]
    assert any(not view.ready.all() for view, _ in deployment.loop._policy.planned)
    planned, done = Counter(), Counter()
    for view, plan in deployment.loop._policy.planned:
        rows = np.flatnonzero(view.ready & (plan.length > 0)).tolist()
        planned.update((view.request[r].item(), view.context[r].item(), plan.draft[r].item(), plan.length[r].item()) for r in rows)
    context = Counter({request: len(PROMPTS[ask.prompt]) for request, ask in zip(_requests(deployment), BUSY.asks, strict=True)})
    for outcome in deployment.policy.outcomes:
        for request, draft, length, emitted in _rows(outcome):
            if length:
                done[request, context[request], draft, length] += 1
            context[request] += emitted
    assert not done - planned, "a row that was not planned so"
    assert sum((planned - done).values()) <= 1, "a row that was planned and not run, beside the one whose client left"


def goodput_of_cohorts_is_counted_once() -> None:
    scenario = replace(BUSY, asks=tuple(replace(ask, leaves=None) for ask in BUSY.asks), cohorts=NUMBERS)
    checks.totals_agree(*serve(scenario))


def texts_sampled_in_cohorts_follow_the_target_s_law(rounds: int = 1_500) -> None:
    checks.texts_follow_the_target_s_law(SamplingParams(1.0), ["other"], rounds, cohorts=(2, 2, 2, 2, 1))


def _requests(deployment: Deployment) -> list[int]:
    """The ids of a scenario's requests, in order."""
    return sorted({request for outcome in deployment.policy.outcomes for request in outcome.request.tolist()})


def _rows(outcome: Outcome) -> list[list[int]]:
    return np.stack([outcome.request, outcome.draft, outcome.length, outcome.emitted], 1).tolist()


SUITE = [
    greedy_texts_of_cohorts_are_those_of_plain_decoding,
    texts_of_trees_in_cohorts_are_those_of_plain_decoding,
    texts_of_cohorts_with_options_are_those_of_plain_decoding,
    log_probs_of_cohorts_are_those_of_the_text,
    kv_of_cohorts_is_that_of_a_fresh_prefill,
    texts_that_begin_alike_in_cohorts_share_kv_and_are_those_of_plain_decoding,
    texts_of_cohorts_survive_pre_emption,
    plan_invariant_texts_of_cohorts_survive_pre_emption,
    every_row_of_a_cohort_gets_what_was_planned_for_it,
    goodput_of_cohorts_is_counted_once,
    texts_sampled_in_cohorts_follow_the_target_s_law,
]
