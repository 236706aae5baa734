"""The loop over a target that verifies in a thread of its own: overlap, failures, and one final
reply each.
"""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.in_flight import InFlight
from backend.core.orchestrator import Orchestrator
from backend.engines.fake import FakeEngine
from backend.engines.overlapped import Overlapped
from backend.engines.port import Turn
from backend.request import ErrorCode, SamplingParams
from backend.sequence import Sequence
from policy import FixedLength, NoSpeculation
from tests.forced_cohorts import ForcedCohorts
from tests.unit.test_orchestrator import RandomChoice, World, break_target, plain_text

GUARD_S = 30.0


class Cohorts(World):
    """The same world, its batch cut into cohorts."""

    def __init__(self, cohorts=2, policy=None, **options):
        super().__init__(ForcedCohorts(policy or RandomChoice(), cohorts), **options)
        self.verifier = self.ledger._target = Overlapped(self.target)
        self.loop._target, self.loop._in_flight = (
            self.verifier,
            InFlight(self.verifier, self.loop._stats),
        )


@pytest.mark.medium
@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.text("abcdef ", min_size=1, max_size=40), min_size=1, max_size=8),
    cohorts=st.integers(1, 4),
    blocks=st.sampled_from([9, 14, 1000]),
    seed=st.integers(0, 1000),
    leaving=st.sets(st.integers(0, 7)),
)
def test_everyone_gets_one_final_reply_and_no_text_depends_on_cohorts(
    prompts, cohorts, blocks, seed, leaving
):
    world = Cohorts(cohorts, blocks=blocks, chunk=11, seed=seed)
    sinks = [world.submit(prompt) for prompt in prompts]
    for step in range(6):
        world.loop.step()
        if step in leaving and step < len(sinks):
            sinks[step].cancelled = True
    world.run()
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert len(sink.ends) == 1
        text = plain_text(prompt)
        assert sink.text == text or (sink.cancelled and text.startswith(sink.text))


def test_one_cohort_is_drafted_for_while_another_is_verified(monkeypatch):
    """The target's pass ends when a draft has been asked since it was submitted, or never."""
    world = Cohorts(policy=FixedLength("draft0", 3), drafts=(0.9,), chunk=20)
    asked, waited = threading.Condition(), []
    drafts, drafts_before = [], {}
    submit, verify, draft = world.verifier.submit, world.target.poll, world.drafts[0].poll

    def submitting(turns):
        drafts_before[turns[0].sequence.id] = len(drafts)
        submit(turns)

    def verifying(timeout_s):
        turns = world.target._queued
        if len(waited) < 8 and turns and turns[0].proposal:
            with asked:
                waited.append(
                    asked.wait_for(
                        lambda: len(drafts) > drafts_before[turns[0].sequence.id], GUARD_S
                    )
                )
        return verify(timeout_s)

    def drafting(timeout_s):
        with asked:
            drafts.append(timeout_s)
            asked.notify_all()
        return draft(timeout_s)

    monkeypatch.setattr(world.verifier, "submit", submitting)
    monkeypatch.setattr(world.target, "poll", verifying)
    monkeypatch.setattr(world.drafts[0], "poll", drafting)
    sinks = [world.submit(prompt, 60) for prompt in ("abcdef", "defabc")]
    world.run()
    assert waited == [True] * 8
    assert [sink.text for sink in sinks] == [
        plain_text(prompt, 60) for prompt in ("abcdef", "defabc")
    ]


@pytest.mark.parametrize("culprit", [1, 4, 7])
def test_of_cohorts_that_the_target_cannot_run_only_the_culprit_fails(monkeypatch, culprit):
    world = Cohorts()
    sinks = {i: world.submit(f"prompt {i}", 10) for i in range(1, 8)}
    world.loop.step()
    break_target(
        monkeypatch, world, lambda turns: any(turn.sequence.id == culprit for turn in turns)
    )
    world.run()
    assert sinks.pop(culprit).ends == [(ErrorCode.INTERNAL, "the engine failed (MemoryError)")]
    assert [sink.text for sink in sinks.values()] == [plain_text(f"prompt {i}", 10) for i in sinks]


@pytest.mark.parametrize("submissions", [{3}, {4, 8, 13}])
def test_a_target_that_raises_now_and_then_costs_nobody_a_token(monkeypatch, submissions):
    world, count = Cohorts(), itertools.count()
    break_target(monkeypatch, world, lambda turns: next(count) in submissions)
    sinks = [world.submit(prompt) for prompt in ("abc", "defghijklmnop", "x", "yz")]
    world.run()
    assert [sink.text for sink in sinks] == [
        plain_text(prompt) for prompt in ("abc", "defghijklmnop", "x", "yz")
    ]


@pytest.mark.parametrize("submission", range(2, 9))
def test_a_target_that_raises_while_all_cohorts_are_waited_for_costs_nobody_a_token(
    monkeypatch, submission
):
    class NowAndThen(ForcedCohorts):
        """Every other plan waits for all that is in flight."""

        plans = itertools.count()

        def plan(self, view, state, now, rng):
            policy = super() if next(self.plans) % 2 == 0 else self.policy
            return policy.plan(view, state, now, rng)

    world, count = Cohorts(), itertools.count()
    world.loop.planning.policy = NowAndThen(RandomChoice(), 2)
    break_target(monkeypatch, world, lambda turns: next(count) == submission)
    sinks = [world.submit(prompt) for prompt in ("abc", "defghijklmnop", "x", "yz")]
    world.run()
    assert [sink.text for sink in sinks] == [
        plain_text(prompt) for prompt in ("abc", "defghijklmnop", "x", "yz")
    ]


def test_a_target_that_fails_for_good_ends_everything_once(monkeypatch):
    world = Cohorts(max_active=2)
    break_target(monkeypatch, world, lambda turns: True)
    sinks = [world.submit("abc") for _ in range(12)]
    world.loop.run(threading.Event())
    assert [len(sink.ends) for sink in sinks] == [1] * 12
    assert sinks[-1].ends == [
        (ErrorCode.UNAVAILABLE, "the engine keeps failing: it is being restarted")
    ]
    assert world.ledger.usage()["used"] == 0


def test_abort_while_cohorts_are_in_flight_ends_everything_once():
    world = Cohorts()
    sinks = [world.submit("abc", 500), world.submit("def", 500)]
    for _ in range(4):
        world.loop.step()
    assert len(world.loop._in_flight) == 1
    world.loop.abort(ErrorCode.UNAVAILABLE, "the server is shutting down")
    assert [sink.ends for sink in sinks] == [
        [(ErrorCode.UNAVAILABLE, "the server is shutting down")]
    ] * 2
    world.run()
    assert len(world.loop._in_flight) == 0


def test_a_change_between_steps_waits_for_every_cohort():
    world = Cohorts()
    sinks = [world.submit("abc", 60), world.submit("def", 60)]
    for _ in range(4):
        world.loop.step()
    seen = []
    done = world.loop.between_steps(lambda: seen.append(dict(world.loop._in_flight.proposals)))
    for _ in range(3):
        world.loop.step()
    assert done.done()
    assert seen == [{}]
    world.run()
    assert [sink.text for sink in sinks] == [plain_text("abc", 60), plain_text("def", 60)]


def test_the_policy_learns_of_each_cohort_in_its_own_view_and_times(monkeypatch):
    told = []

    class Learning(FixedLength):
        def stand_by(self, view, state):
            told.append(view.request.tolist())
            return state

        def observe(self, outcome, state, now):
            if len(outcome.request):
                told.append(outcome)
            return state

    world = Cohorts(policy=Learning("draft0", 2), drafts=(0.9,), chunk=20)
    world.target._step_s, world.drafts[0]._step_s = 0.004, 0.001
    for prompt in ("abc", "def", "ghi", "jkl"):
        world.submit(prompt, 12)
    world.run()
    pairs = [
        (one, other)
        for one, other in itertools.pairwise(told)
        if isinstance(one, list) and not isinstance(other, list)
    ]
    speculating = [(view, outcome) for view, outcome in pairs if outcome.length.any()]
    assert len(speculating) > 6
    for view, outcome in speculating:
        assert view == outcome.request.tolist()
        assert outcome.flight.tolist() == [0] * len(view)
        assert outcome.parts_s["verify"] >= 0.004
        assert outcome.parts_s["draft:draft0"] >= 0.001


def test_a_view_shows_what_is_in_flight_behind_what_is_ready():
    views = []

    class Seeing(NoSpeculation):
        def plan(self, view, state, now, rng):
            views.append(view)
            return super().plan(view, state, now, rng)

    world = Cohorts(policy=Seeing())
    for prompt in ("abc", "def", "ghi"):
        world.submit(prompt, 10)
    world.run()
    mixed = [view for view in views if not view.ready.all() and view.ready.any()]
    assert mixed
    for view in mixed:
        assert not np.diff(view.ready.astype(int)).max(initial=-1) > 0
        assert not view.ceiling[~view.ready].any()


def test_an_engine_that_cannot_run_beside_others_work_is_refused():
    class Alone(FakeEngine):
        def __init__(self):
            super().__init__("alone")
            self.limits = type(self.limits)(257, 100, 4, 4, 0)

    with pytest.raises(ValueError, match="'alone' must be one that runs beside"):
        Overlapped(Alone())


def test_a_cancelled_turn_completes_no_more_and_the_others_of_its_submission_do():
    verifier = Overlapped(FakeEngine("target", step_s=0.01))
    sequences = [Sequence(i, [97, 98], 2, SamplingParams()) for i in (1, 2)]
    verifier.submit([Turn(sequence, 2) for sequence in sequences])
    verifier.cancel([1])
    verifier.submit([Turn(sequences[0], 2)])
    assert [completion.sequence_id for completion in verifier.poll(0.0)] == [2]
    assert [completion.sequence_id for completion in verifier.poll(0.0)] == [1]
    assert verifier.poll(0.0) == []
    verifier.close()


def test_the_loop_without_cohorts_has_one_flight_and_no_thread():
    world = World()
    world.submit("abc")
    world.run()
    assert isinstance(world.loop, Orchestrator)
    assert world.loop._in_flight._overlapped is None
    assert not world.loop._in_flight.decoding
