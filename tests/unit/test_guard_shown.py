"""The guard in the loop: what it measures there, and what operators see of it."""

import json

import numpy as np
import pytest

from backend.app import build
from backend.config import parse_config
from backend.ops.stats import Stats, StepStats
from backend.request import SamplingParams
from backend.sequence import Sequence
from backend.speculation.cycle import Cycle
from backend.speculation.drafting import Drafting
from backend.speculation.explaining import explain_last
from backend.speculation.plan_metrics import PlanMetrics
from backend.speculation.policy_runner import PolicyRunner
from bench.in_process import SilentSink
from policy import FixedLength, SwitchedPolicy, Switches, View
from policy.guard import Guard, Memory, guard_in
from policy.levels import NONE, PLANNED, Bucket
from policy.paired import Comparison
from policy.wrappers import WrapperState
from tests.fakes.apps import FAKE, ask, fake_app, finish
from tests.fakes.policies import outcome, view

DRAFTS = ("small", "large")


def samples(mean, count=8):
    comparison = Comparison()
    for _ in range(count):
        comparison = comparison.learnt(mean)
    return comparison


def bucket(level, other):
    """Return a bucket at a level; ``other``: the logarithm of the other one's goodput over its."""
    return Bucket(level, samples(other))


def gauges(stats):
    shown = stats.drain().gauges
    return {(name, *labels.values()): value for name, labels, value in shown if "guard" in name}


def test_the_gauges_show_each_load_that_was_compared():
    stats = Stats()
    guard = Guard(FixedLength("small", 2))
    policy = SwitchedPolicy(guard, Switches)
    runner = PolicyRunner(policy, DRAFTS, StepStats(stats), lambda: 0.0, 0)
    buckets = {0: bucket(PLANNED, -0.2), 3: bucket(NONE, -0.1), 4: Bucket()}
    memory = Memory(buckets=buckets)  # as after a restart
    runner.state = WrapperState(WrapperState(None, memory))
    seen = view(2, DRAFTS)
    plan, _ = guard.plan(seen, runner.state.inner, 0.0, np.random.default_rng(0))
    runner.observe(outcome(seen, plan, 1))
    assert gauges(stats) == {
        ("spindle_guard_level", "1"): 0,
        ("spindle_guard_ratio", "1"): pytest.approx(np.exp(0.2)),
        ("spindle_guard_level", "5-8"): 2,
        ("spindle_guard_ratio", "5-8"): pytest.approx(np.exp(-0.1)),
        ("spindle_guard_level", "9-16"): 0,
    }


def test_steps_of_experiments_are_counted():
    stats = Stats()
    counted = PlanMetrics(StepStats(stats))
    seen = view(2, DRAFTS)
    plan = FixedLength("small", 2).plan(seen, None, 0.0, None)[0]
    for level in ("none", "none", "planned", None):
        plan.notes = {"experiment": level} if level else {"guard": "none"}
        counted.step(plan, outcome(seen, plan, 1), DRAFTS, [False] * 2)
    counts = {
        labels["level"]: value
        for name, labels, value in stats.drain().counters
        if name == "spindle_guard_experiment_steps_total"
    }
    assert counts == {"none": 2, "planned": 1}


def test_two_open_steps_are_paired_by_what_each_was_planned_for():
    guard = Guard(FixedLength("d", 2))
    config = parse_config({**FAKE, "drafts": [{"name": "d", "engine": "lookup"}]})
    drafts, stats = build(config).drafts, StepStats(Stats())
    cycle = Cycle(Drafting(drafts, stats, lambda: 0.0), guard, stats, lambda: 0.0)
    rows = [Sequence(i, [5, 6, 7] * 5, 5, SamplingParams()) for i in range(4)]
    ids, ones = np.arange(4), np.ones(4, np.int64)
    pending, levels = [], []
    for number in range(400):
        columns = cycle.drafting.ceilings(rows, [2] * 4)
        # Each step has its own column of requests, as in the loop.
        seen = View(("d",), ids.copy(), 15 * ones, 50 * ones, *columns[:2])
        log = cycle.begin()
        pending.append(cycle.propose(rows, seen, cycle.runner.plan(seen, log), log))
        if number:
            step = pending.pop(0)
            proposing = [step.proposal_of(row.id) is not None for row in rows]
            levels.append(proposing[0])
            for row in rows:
                cycle.note_verified(step, row, 2 * proposing[0], [5, 6, 7][: 1 + 2 * proposing[0]])
            cycle.learn(step)
            memory = cycle.runner.state.outer
            assert len(memory.pending) == 1
            is_planned = memory.buckets[2].level == PLANNED  # by this machine's times
            assert not is_planned or all(step.proposes for step in memory.pending_steps)
    assert not all(levels)
    assert memory.samples


@pytest.mark.parametrize(
    ("level", "experiment", "words"),
    [
        ("planned", "", "with 2 in flight the planner's choice measures 1.22x plain decoding"),
        ("none", "", "the guard applies no speculation"),
        ("none", "planned", "the guard tries the planner's choice in this step"),
        ("planned", "none", "the guard tries no speculation in this step"),
    ],
)
def test_explain_says_what_the_guard_does(level, experiment, words):
    app = build(parse_config(FAKE))
    for text in ("one", "two"):
        app.orchestrator.submit(app.session(ask_for(text), SilentSink()))
    for _ in range(3):
        app.orchestrator.step()
    runner = app.orchestrator.cycle.runner
    plan = runner.last_plan[2]
    plan.notes |= {"guard": level} | ({"experiment": experiment} if experiment else {})
    memory = Memory(buckets={1: bucket(NONE, -0.1) if level == "none" else bucket(PLANNED, -0.2)})
    runner.state = WrapperState(WrapperState(runner.state.inner.inner, memory))
    explained = explain_last(app.orchestrator.cycle)
    assert words in explained["step"]
    given = (experiment or level) == "none"
    assert (explained["requests"][0].startswith("all requests")) == given
    assert len(explained["requests"]) == (1 if given else 2)


def ask_for(text):
    from backend.request import GenerationRequest

    return GenerationRequest(text, 50, end_id=-1)


def test_a_guard_is_found_within_other_wrappers():
    guard = Guard(FixedLength("small", 2))
    assert guard_in(guard) == (guard, 0)
    assert guard_in(SwitchedPolicy(guard, Switches)) == (guard, 1)
    assert guard_in(FixedLength("small", 2)) is None


def test_what_was_found_is_shown_and_kept_with_what_was_learnt():
    app = fake_app(target={"engine": "tests.fakes.fake", "options": {"step_s": 0.002}})
    finish(app, ask(app, "text", 40))
    shown = json.loads(json.dumps(app.learned_state.show()))
    assert shown["guard"]["rows"]["1"]["level"] == "planned"
    state = app.orchestrator.cycle.runner.policy.load(shown, 0.0, 0.0)
    assert state.inner.outer.buckets[0].level == PLANNED != NONE
