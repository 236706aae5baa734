"""A draft that takes states of every pass, and brings less than that costs, stops taking them."""

import itertools
from dataclasses import replace

import pytest

from backend.engines.port import EngineLimits, HiddenStates
from backend.ops.stats import Stats, StepStats
from backend.request import SamplingParams
from backend.sequence import Sequence
from backend.speculation import cycle, sleeping, step_log
from backend.speculation.drafting import Drafting
from backend.speculation.explaining import explain_last
from backend.speculation.sleeping import SLEEP_AFTER_STEPS, WAKE_AFTER_STEPS, Sleep
from backend.speculation.step_log import StepLog
from policy import NoSpeculation
from tests.fakes.apps import ask, fake_app
from tests.fakes.engines import FaultyEngine
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.loop import World


def steps_awake(sleep, rows=4):
    return next(step for step in itertools.count() if not sleep.takes(rows))


def test_it_sleeps_after_many_steps_without_a_proposal_and_wakes_to_be_tried():
    sleep = Sleep("eagle")
    assert steps_awake(sleep) == SLEEP_AFTER_STEPS
    asleep = next(step for step in itertools.count(1) if sleep.takes(4))
    assert asleep == WAKE_AFTER_STEPS
    assert steps_awake(sleep) == SLEEP_AFTER_STEPS


@pytest.mark.parametrize(
    ("states_s", "proposing_s", "price", "awake"),
    [(0.01, 0.0, 90.0, True), (0.01, 0.0, 110.0, False), (0.01, 0.01, 60.0, False)],
)
def test_its_seconds_are_weighed_against_its_tokens_at_the_price(
    states_s, proposing_s, price, awake
):
    sleep = Sleep("eagle")
    for _ in range(2 * SLEEP_AFTER_STEPS):
        sleep.takes(4)
        sleep.states_s += states_s
        sleep.weigh(1, proposing_s, price)
    assert sleep.takes(4) == awake


def test_what_it_brought_long_ago_fades():
    sleep = Sleep("eagle")
    for _ in range(SLEEP_AFTER_STEPS):
        sleep.takes(4)
        sleep.weigh(1, 0.0, 100.0)
    for _ in range(5 * SLEEP_AFTER_STEPS):
        sleep.weigh(0, 0.001, 100.0)
    assert not sleep.takes(4)


def test_a_batch_of_half_the_rows_wakes_it():
    sleep = Sleep("eagle")
    steps_awake(sleep, rows=16)
    assert not sleep.takes(9)
    assert sleep.takes(8)


@pytest.mark.parametrize(("states_s", "awake"), [(1e-5, True), (0.02, False)])
def test_a_planner_lets_a_draft_sleep_whose_states_are_dear(states_s, awake, monkeypatch):
    now, poll = [0.0], FakeEngine.poll

    def polled(engine, timeout_s):
        completions = poll(engine, timeout_s)
        now[0] += 0.002 if engine.name == "target" else 0.0002 * bool(completions)
        for completion in completions if engine.name == "target" else ():
            completion.hidden_states = HiddenStates(0, (1,), [0])
        return completions

    def absorbed(engine, states):
        del engine, states
        now[0] += states_s

    monkeypatch.setattr(FakeEngine, "poll", polled)
    monkeypatch.setattr(FakeEngine, "absorb", absorbed, raising=False)
    monkeypatch.setattr(sleeping, "SLEEP_AFTER_STEPS", 100)
    for module in (step_log, cycle):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    app = fake_app(
        drafts=[{"name": "eagle", "engine": "tests.fakes.fake", "options": {"agreement": 0.5}}]
    )
    ask(app, "a text", 400)
    for _ in range(150):
        app.orchestrator.step()
    line = "eagle sleeps: states cost more than its proposals bring"
    assert (line in explain_last(app.orchestrator.cycle)["step"]) != awake
    app.close()


class Reader:
    """A draft that counts what it takes."""

    taken = 0

    def __init__(self, name, kv_blocks):
        self.name, self.limits = name, EngineLimits(9, 99, 4, 4, kv_blocks)

    def absorb(self, states):
        self.taken += len(states)


class Holed(Reader):
    """A draft that has missed states."""

    def holes(self):
        return 2


def test_missed_states_are_reported():
    drafting = Drafting([Reader("head", 0), Holed("eagle", 1)], StepStats(Stats()), lambda: 0.0)
    assert drafting.remarks() == ["eagle has missed states of 2 requests"]


def test_only_drafts_that_keep_kv_sleep():
    readers = [Reader("eagle", kv_blocks=1), Reader("head", kv_blocks=0)]
    drafting = Drafting(readers, StepStats(Stats()), lambda: 0.0)
    log, sequence = StepLog(("eagle", "head")), Sequence(1, [1, 2], 1, SamplingParams())
    states = [(sequence, HiddenStates(0, (1,), [0]))]
    for _ in range(SLEEP_AFTER_STEPS + 5):
        drafting.absorb(states, log)
    assert [reader.taken for reader in readers] == [SLEEP_AFTER_STEPS, SLEEP_AFTER_STEPS + 5]
    assert log.parts_s["verify"] > 0


@pytest.mark.parametrize(
    ("needs", "kv_blocks", "states"), [(True, 0, True), (False, 0, False), (False, 1000, True)]
)
def test_the_target_gives_no_states_that_no_draft_goes_on_from(
    needs, kv_blocks, states, monkeypatch
):
    class Sure(NoSpeculation):
        def needs_ceilings(self, request, state):
            return needs

    asked = set()

    def submit(engine, turns):
        asked.update(turn.states for turn in turns)
        FakeEngine.submit(engine, turns)

    monkeypatch.setattr(FaultyEngine, "absorb", lambda engine, states: None, raising=False)
    world = World(Sure(), drafts=(0.5,))
    monkeypatch.setattr(type(world.target), "submit", submit)
    world.drafts[0].limits = replace(world.drafts[0].limits, kv_blocks=kv_blocks)
    world.loop.cycle.change(world.drafts, Sure(), None)
    world.submit("a prompt of some chunks", 20)
    world.run()
    assert asked == {states}
