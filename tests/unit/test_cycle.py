"""The cycle of propose, verified and learn, without a loop around it."""

from dataclasses import replace

import numpy as np

from backend.engines.lookup import LookupEngine
from backend.engines.proposer import InTarget
from backend.ops.stats import Stats, StepStats
from backend.request import SamplingParams
from backend.sequence import Sequence
from backend.speculation.cycle import Cycle
from backend.speculation.drafting import Drafting
from policy import FixedLength, Plan, View
from policy.evidence import bin_of_match

NAME, LENGTH = "lookup", 3


class Recorder(FixedLength):
    def __init__(self, trimmed=LENGTH):
        super().__init__(NAME, LENGTH)
        self.outcomes, self.trimmed = [], trimmed

    def trim(self, view, plan, drafted, state):
        return np.full(len(view), self.trimmed)

    def observe(self, outcome, state, now):
        self.outcomes.append(outcome)


class Resting(Recorder):
    def plan(self, view, state, now, rng):
        return Plan.nothing(len(view)), state


def cycle(policy):
    stats = StepStats(Stats())
    draft = LookupEngine(NAME, max_draft_tokens=LENGTH)
    return Cycle(Drafting([draft], stats, lambda: 0.0), policy, stats, lambda: 0.0)


def sequence(number=1):
    return Sequence(number, [5, 6, 7, 8, 9] * 4, 5, SamplingParams())


def propose(made, *sequences):
    ids, ones = np.array([s.id for s in sequences]), np.ones(len(sequences), np.int64)
    ceiling, unseen, evidence = made.drafting.ceilings(sequences, [LENGTH] * len(sequences))
    view = View(made.drafting.names, ids, 20 * ones, 50 * ones, ceiling, unseen, evidence=evidence)
    log = made.begin()
    return made.propose(sequences, view, made.runner.plan(view, log), log)


def test_the_policy_learns_what_was_verified_and_emitted():
    policy = Recorder(trimmed=2)
    made, one = cycle(policy), sequence()
    step = propose(made, one)
    assert step.proposal_of(one.id).tokens == [5, 6]
    made.note_verified(step, one, 2, [5, 6, 7])
    made.forget(one.id)
    made.learn(step)
    (outcome,) = policy.outcomes
    rows = outcome.rows
    figures = [c.item() for c in (rows.draft, rows.length, rows.verified, rows.followed)]
    assert figures == [0, 3, 2, 2]
    assert rows.accepted.tolist() == [3]  # its cut node was right, too
    assert outcome.finished.tolist() == [one.id]


def test_what_a_draft_showed_before_it_proposed_is_learnt_whatever_is_verified():
    shown = [bin_of_match(15, agree=True)]  # three of four times the five tokens
    for policy in (Recorder(trimmed=0), Resting()):
        made, one = cycle(policy), sequence()
        step = propose(made, one)
        made.note_verified(step, one, 0, [5])
        made.learn(step)
        (outcome,) = policy.outcomes
        assert step.view.evidence.tolist() == [shown]
        rests = isinstance(policy, Resting)
        assert outcome.rows.evidence.tolist() == ([0] if rests else shown)
        assert outcome.free.evidence.tolist() == (shown if rests else [])


def test_two_open_steps_keep_their_own_proposals():
    policy = Recorder()
    made, one, other = cycle(policy), sequence(1), sequence(2)
    first, second = propose(made, one), propose(made, other)
    assert first.proposal_of(other.id) is None
    made.note_verified(second, other, LENGTH, [5, 9])
    made.note_verified(first, one, LENGTH, [5, 6, 7, 8])
    made.learn(first)
    made.learn(second)
    assert [o.rows.request.tolist() for o in policy.outcomes] == [[1], [2]]
    assert [o.rows.accepted.tolist() for o in policy.outcomes] == [[3], [1]]


def test_a_host_that_takes_proposals_whole_gets_them_untrimmed():
    made, one = cycle(Recorder(trimmed=0)), sequence()
    assert propose(made, one).proposal_of(one.id) is None
    made.trims = False
    assert len(propose(made, one).proposal_of(one.id)) == LENGTH


def test_requests_that_end_without_a_step_are_forgotten_once():
    policy = Recorder()
    made = cycle(policy)
    made.learn(None)
    assert policy.outcomes == []
    made.forget(7)
    made.learn(None)
    made.learn(None)
    assert [o.finished.tolist() for o in policy.outcomes] == [[7]]


def test_a_busy_loop_s_step_starts_where_the_last_one_ended():
    made, one = cycle(Recorder()), sequence()
    step = propose(made, one)
    made.learn(step)
    log = made.begin()
    assert "learning" in log.parts_s
    made.learn(propose(made, one))
    made.pause()
    assert made.begin().parts_s == {}


class ForTheBatch(FixedLength):
    def plan(self, view, state, now, rng):
        plan, state = super().plan(view, state, now, rng)
        return replace(plan, nodes=7), state


def test_rows_share_the_nodes_of_a_plan_for_the_batch():
    stats = StepStats(Stats())
    draft = InTarget(NAME, max_draft_tokens=8, whole_batch=True)
    policy = ForTheBatch(NAME, LENGTH)
    made = Cycle(Drafting([draft], stats, lambda: 0.0), policy, stats, lambda: 0.0)
    step = propose(made, sequence(1), sequence(2))
    asked = [row.on_device for row in step.proposals.values()]
    assert [(ask.length, ask.nodes) for ask in asked] == [(LENGTH, 4), (LENGTH, 3)]
