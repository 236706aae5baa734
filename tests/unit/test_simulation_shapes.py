"""The simulated truth of cohorts and cut contexts, and what the planner makes of it."""

from dataclasses import replace

import numpy as np
import pytest

from policy import AdaptivePlanner, LatencyCurve, LatencyModel, Plan
from policy.decomposition import Decomposition
from policy.pipelining import Pipelining, pipelined_s
from policy.replay import Traced, replayed, same
from policy.simulation import presets
from policy.simulation.arms import make_policy
from policy.simulation.deployment import Deployment
from policy.simulation.fleet import simulate
from policy.simulation.workload import Category, Mix, backlog, draw

pytestmark = pytest.mark.slow

HAZARD = 0.6


def line(fixed_s, token_s, context_s=0.0):
    return LatencyCurve(np.array([fixed_s, fixed_s + token_s]), token_s, 0.0, context_s)


def deployment(**changes):
    model = LatencyModel(line(0.010, 1e-4), (line(0.001, 1e-5), line(0.001, 1e-5)))
    made = Deployment("made-up", "made up", ("a", "b"), model, (False, False), noise=0.0)
    return replace(made, **changes)


def mix(prompt=20, output=3000):
    same_everywhere = {"spread": 0.0, "draft_spread": 0.0, "length_spread": 0.0}
    return Mix(
        "same", (Category("same", 1.0, prompt, output, {"a": HAZARD, "b": 0.5}),), **same_everywhere
    )


class Always:
    """A policy that gives every row the same chain, executed in the same way."""

    def __init__(self, length, **executed):
        self.length, self.executed, self.outcomes = length, executed, []

    def start(self):
        return None

    def plan(self, view, state, now, rng):
        executed = {name: value(len(view)) for name, value in self.executed.items()}
        return replace(Plan.within(view, 0, self.length), **executed if len(view) else {}), state

    def observe(self, outcome, state, now):
        self.outcomes.append(outcome)
        return state

    def drift(self, state):
        return {}


def tokens_per_row(policy, made, requests=4):
    work = draw(mix(), made.drafts, backlog(requests), 0, made.k_max, 10.0)
    run = simulate(made, work, lambda: policy, 0)
    full = [step for step in run.steps if step.rows == requests]
    return sum(step.emitted for step in full) / sum(step.rows for step in full), run


def test_cohorts_take_the_pipeline_s_time_once_they_are_running():
    made = deployment(execution=Pipelining(2, 1.1))
    policy = Always(2, flight=lambda n: np.arange(n) * 2 // n)
    _, run = tokens_per_row(policy, made)
    full = [step.seconds for step in run.steps if step.rows == 4 and step.proposed == 8]
    draft_s, verify_s = (
        2 * 0.001 + 2 * 1e-5 + 5e-4,
        0.010 + 6 * 1e-4,
    )  # by cohort: two rows, six tokens
    assert np.median(full) == pytest.approx(
        pipelined_s(np.full(2, draft_s), np.full(2, verify_s), 1.1), rel=0.02
    )


def test_padded_contexts_cost_their_padding_and_cut_ones_what_their_pieces_read():
    model = LatencyModel(line(0.010, 0.0, 1e-6), (line(0.001, 0.0), line(0.001, 0.0)))
    seconds = {}
    for name, pads, piece in (("ragged", False, 0), ("padded", True, 0), ("cut", True, 16)):
        made = deployment(latency=model, execution=Decomposition(4.0, 16) if pads else None)
        _, run = tokens_per_row(Always(0, piece_tokens=lambda n, piece=piece: piece), made)
        seconds[name] = np.array([step.seconds for step in run.steps if step.rows == 4][:50])
    assert (seconds["padded"] >= seconds["ragged"]).all()
    context = 20 + 1 + np.arange(50)
    pieces = -(-context // 16)
    assert seconds["cut"] - seconds["ragged"] == pytest.approx(
        1e-6 * 4 * (pieces * 20.0 - context), abs=1e-9
    )


def test_a_recorded_simulation_in_cohorts_replays_bit_for_bit():
    (made, mix_), lines = presets.slow_draft(1.0), []
    planner = AdaptivePlanner(made.drafts, made.latency, execution=made.execution)
    policy = Traced(planner, lines.append, 500)
    work = draw(mix_, made.drafts, backlog(24), 0, made.k_max, 10.0)
    simulate(made, work, lambda: policy, 0)
    steps = list(replayed(lines))
    assert len(steps) > 50
    assert sum(step.recorded.flight is not None for step in steps) > 10
    assert all(same(step.recorded, step.plan) for step in steps)


def speed(made, mix_, arm, requests):
    work = draw(mix_, made.drafts, backlog(requests), 0, made.k_max, 1.0)
    policy = make_policy(arm, made, mix_, work, made.latency, 0)
    return simulate(made, work, lambda: policy, 0).tokens_per_s


def test_cohorts_pay_where_drafting_is_slow_and_are_refused_where_weights_bind():
    made, mix_ = presets.slow_draft(1.0)
    one, two = (speed(made, mix_, arm, 64) for arm in ("without:execution", "adaptive"))
    assert two > 1.02 * one
    bound = replace(presets.llama_8b_h100(), max_active=16, execution=Pipelining(2, 1.1))
    one, two = (speed(bound, presets.CHAT, arm, 32) for arm in ("without:execution", "adaptive"))
    assert two == pytest.approx(one, rel=0.01)


def test_cut_contexts_win_back_most_of_what_padding_costs():
    made, mix_ = presets.padded()
    padded, cut = (speed(made, mix_, arm, 64) for arm in ("without:execution", "adaptive"))
    ragged = speed(replace(made, execution=None), mix_, "adaptive", 64)
    assert cut > 1.5 * padded
    assert cut < 1.02 * ragged
