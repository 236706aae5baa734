"""Nothing stays out for good: after any history every draft is tried again, and is used at the
length that it has come to be worth.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.micro.choices import predict_parts
from policy import (
    AcceptanceConfig,
    AdaptivePlanner,
    LatencyModel,
    LatencyTable,
    PlannerConfig,
    StepTimes,
    View,
)
from policy.latency import Correction
from tests.fakes.outcomes import outcome_of

DRAFTS, K_MAX, PROMPT = ("a", "b", "c"), 4, 50
FORGETFUL = AcceptanceConfig(draft_memory_rows=100.0, request_memory_steps=30.0)


def times(*costs_s):
    """A target of a second, and what a forward of each draft takes."""
    drafts = {
        d: LatencyTable.synthetic(d, {1: cost_s, 64: 2 * cost_s})
        for d, cost_s in zip(DRAFTS, costs_s, strict=True)
    }
    return LatencyModel.from_tables(LatencyTable.synthetic("target", {1: 1.0, 64: 1.2}), drafts)


TIMES = times(0.02, 0.04, 0.06)
ALL, IN_TIME = (True,) * len(DRAFTS), (1.0,) * (1 + len(DRAFTS))


@dataclass(frozen=True)
class Phase:
    """For a number of steps: the tokens of each draft that hold and by which chance, which are
    allowed, how many steps a request lasts, by what the target and the drafts are slower than their
    tables, and the pause after a step.
    """

    steps: int
    holds: tuple[int, ...]
    chance: float
    allowed: tuple[bool, ...]
    life: int
    slowness: tuple[float, ...]
    idle_s: float


def each(values):
    return st.tuples(*[values] * len(DRAFTS))


PHASES = st.builds(
    Phase,
    st.integers(1, 100),
    each(st.integers(0, K_MAX)),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    each(st.booleans()),
    st.sampled_from([1, 10, 60, 1000]),
    st.tuples(*[st.sampled_from([0.3, 1.0, 4.0])] * (1 + len(DRAFTS))),
    st.sampled_from([0.0, 1.0, 1e5]),
)
HISTORIES = st.lists(PHASES, min_size=1, max_size=3)


class World:
    """A closed loop of a few rows around a planner; what has been planned stays in ``planned``, one
    set of (draft, length) a step.
    """

    def __init__(self, rows, seed, times=TIMES):
        config = PlannerConfig(k_max=K_MAX, explore_share=0.05, acceptance=FORGETFUL)
        self.planner, self.rng = AdaptivePlanner(DRAFTS, times, config), np.random.default_rng(seed)
        self.times = Correction.start(len(DRAFTS)).times(times)
        self.state, self.now, self.rows, self.planned = self.planner.start(), 0.0, rows, []
        self.request, self.age, self.lag = (
            np.arange(rows),
            np.zeros(rows, np.int64),
            np.full((rows, len(DRAFTS)), PROMPT),
        )

    def live(self, phase):
        for _ in range(phase.steps):
            self._step(phase)
            self.now += phase.idle_s

    def _step(self, phase):
        rows = self.rows
        view = View(
            DRAFTS,
            request=self.request,
            context=PROMPT + self.age,
            remaining=np.full(rows, 100),
            ceiling=np.tile(np.where(phase.allowed, K_MAX, 0), (rows, 1)),
            catchup=self.lag.copy(),
        )
        plan, state = self.planner.plan(view, self.state, self.now, self.rng)
        self.planned.append(
            {(d, k) for d, k in zip(plan.draft.tolist(), plan.length.tolist(), strict=True) if k}
        )
        most = np.minimum(
            np.where(plan.draft >= 0, np.array(phase.holds)[plan.draft], 0), plan.length
        )
        accepted = np.cumprod(
            (self.rng.random((rows, K_MAX)) < phase.chance) & (np.arange(K_MAX) < most[:, None]),
            axis=1,
        ).sum(1)
        self.age += 1
        over = self.age >= phase.life
        done = view.request, plan.draft, plan.length, accepted, accepted + 1
        seen = outcome_of(
            *done, plan.length, plan.length, 0.0, finished=self.request[over], view=view, plan=plan
        )
        verify_s, overhead_s, *drafts_s = predict_parts(
            self.planner, self.times, seen, view
        ).tolist()
        parts_s = dict(
            zip(
                ("verify", *(f"draft:{d}" for d in DRAFTS)),
                np.multiply([verify_s, *drafts_s], phase.slowness),
                strict=True,
            )
        )
        seen.times = StepTimes(overhead_s + sum(parts_s.values()), parts_s)
        self.state = self.planner.observe(seen, state, self.now)
        self.now += seen.times.measured_s
        self.lag += (accepted + 1)[:, None]
        used = plan.length > 0
        self.lag[used, plan.draft[used]] = 1
        self.request = np.where(over, self.request + rows, self.request)
        self.age[over], self.lag[over] = 0, PROMPT


def lived(history, rows, seed, holds):
    """Return what is planned in the last steps of a life in which, after a history, ``holds``
    tokens of each draft match for good.
    """
    world = World(rows, seed)
    for phase in (*history, Phase(600, holds, 1.0, ALL, 40, IN_TIME, 0.0)):
        world.live(phase)
    return world.planned[-300:]


LIVES = {"history": HISTORIES, "rows": st.integers(1, 4), "seed": st.integers(0, 2**32)}


@pytest.mark.slow
@settings(max_examples=12)
@given(**LIVES)
def test_where_nothing_is_ever_accepted_again_every_draft_is_still_tried(history, rows, seed):
    planned = lived(history, rows, seed, (0,) * len(DRAFTS))
    assert {draft for step in planned for draft, _ in step} == set(range(len(DRAFTS)))


@pytest.mark.slow
@settings(max_examples=12)
@given(**LIVES, draft=st.integers(0, len(DRAFTS) - 1), length=st.integers(1, K_MAX))
def test_a_draft_that_turns_out_right_for_some_tokens_is_used_for_no_fewer(
    history, rows, seed, draft, length
):
    planned = lived(
        history, rows, seed, tuple(length if d == draft else 0 for d in range(len(DRAFTS)))
    )
    assert np.mean([any(d == draft and k >= length for d, k in step) for step in planned]) > 0.5


@pytest.mark.medium
def test_a_draft_that_was_too_slow_to_pay_is_used_again_once_it_is_not():
    """All its tokens hold, but eight times as slow as its table it does not pay; and a draft that
    is not used is not timed.
    """
    world = World(2, 0, times(0.2, 0.2, 0.2))
    alone, holds = (True, False, False), (K_MAX,) * len(DRAFTS)
    world.live(Phase(200, holds, 1.0, alone, 40, (1.0, 8.0, 1.0, 1.0), 0.0))
    assert np.mean([bool(step) for step in world.planned[-100:]]) < 0.05
    world.live(Phase(3000, holds, 1.0, alone, 40, IN_TIME, 0.0))
    assert np.mean([(0, K_MAX) in step for step in world.planned[-1000:]]) > 0.9
