"""The simulated truth of cohorts and cut contexts, and what the planner makes of it."""

from dataclasses import replace

import numpy as np
import pytest

from policy import LatencyCurve, LatencyModel, Plan
from policy.cohorts import pipelined_s
from policy.plan import TurnShape
from policy.shaped import ShapedPlanner
from policy.shapes import Shapes
from policy.simulation.deployment import Deployment
from policy.simulation.fleet import simulate
from policy.simulation.shape_cases import EVEN, cases, run_point
from policy.simulation.workload import Category, Mix, backlog, draw
from policy.trace import Traced, replayed, same

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
    return Mix("same", (Category("same", 1.0, prompt, output, {"a": HAZARD, "b": 0.5}),), **same_everywhere)


class Always:
    """A policy that gives every row the same chain and the same shape."""

    def __init__(self, length, shape):
        self.length, self.shape, self.outcomes = length, shape, []

    def start(self):
        return None

    def plan(self, view, state, now, rng):
        shape = self.shape(len(view)) if len(view) else None
        return replace(Plan.within(view, 0, self.length), shape=shape), state

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
    made = deployment(shapes=Shapes(cohorts=2, contention=1.1))
    policy = Always(2, lambda n: TurnShape(cohort=np.arange(n) * 2 // n))
    _, run = tokens_per_row(policy, made)
    full = [step.seconds for step in run.steps if step.rows == 4 and step.proposed == 8]
    draft_s, verify_s = 2 * 0.001 + 2 * 1e-5 + 5e-4, 0.010 + 6 * 1e-4  # by cohort: two rows, six tokens
    assert np.median(full) == pytest.approx(pipelined_s(np.full(2, draft_s), np.full(2, verify_s), 1.1), rel=0.02)


def test_padded_contexts_cost_their_padding_and_cut_ones_what_their_pieces_read():
    model = LatencyModel(line(0.010, 0.0, 1e-6), (line(0.001, 0.0), line(0.001, 0.0)))
    seconds = {}
    for name, pads, piece in (("ragged", False, None), ("padded", True, None), ("cut", True, 16)):
        made = deployment(latency=model, shapes=Shapes(pads=pads, merge_tokens=4.0))
        _, run = tokens_per_row(Always(0, lambda n, piece=piece: TurnShape(piece_tokens=piece)), made)
        seconds[name] = np.array([step.seconds for step in run.steps if step.rows == 4][:50])
    assert (seconds["padded"] >= seconds["ragged"]).all()
    context = 20 + 1 + np.arange(50)
    pieces = -(-context // 16)
    assert seconds["cut"] - seconds["ragged"] == pytest.approx(1e-6 * 4 * (pieces * 20.0 - context), abs=1e-9)


def test_a_recorded_simulation_with_shapes_replays_bit_for_bit():
    (_, made, mix_), lines = cases()["cohorts"][1][0], []
    policy = Traced(ShapedPlanner(made.drafts, made.latency, shapes=made.shapes), lines.append, 500)
    work = draw(mix_, made.drafts, backlog(24), 0, made.k_max, 10.0)
    simulate(made, work, lambda: policy, 0)
    steps = list(replayed(lines))
    assert len(steps) > 50
    assert sum(step.recorded.shape is not None for step in steps) > 10
    assert all(same(step.recorded, step.plan) for step in steps)


def test_cohorts_pay_where_drafting_is_slow_and_the_target_is_busy_with_rows_and_are_refused_where_weights_bind():
    points = {label: (made, mix_) for label, made, mix_ in cases()["cohorts"][1]}
    assert points["slow-draft, 1"][1] is EVEN
    busy, bound = (run_point("cohorts", label, *points[label], [0], 2) for label in ("slow-draft, 1", "8B on H100, 1.1"))
    assert busy["shaped_share"] > 0.5
    assert busy["ratio"][0] > 1.02
    assert bound["shaped_share"] == 0
    assert bound["ratio"][0] == 1


def test_cut_contexts_win_back_most_of_what_padding_costs_and_a_ragged_engine_has_nothing_to_gain():
    points = cases()["decomposition"][1]
    padded, ragged = (run_point("decomposition", *point, [0], 1) for point in points)
    assert padded["ratio"][0] > 1.5
    assert padded["tokens_per_s"] < 1.02 * ragged["tokens_per_s"]
    assert ragged["ratio"][0] == 1
