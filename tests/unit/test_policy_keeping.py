"""Where planning takes more of the time than it may, a choice is kept for some steps."""

from dataclasses import replace

import numpy as np
import pytest

from policy import (
    AdaptivePlanner,
    FreeChains,
    LatencyModel,
    LatencyTable,
    Plan,
    PlannerConfig,
    View,
)
from policy.kept import Kept
from tests.fakes.outcomes import outcome_of

RNG = np.random.default_rng(0)
STEP_S = 0.01
ROWS, MANY = 3, 6
FEW_STEPS, MANY_STEPS = 16, 32  # at most
PARTS = ("small", "lookup")


def view(rows=ROWS, **changes):
    shape = (rows, 2)
    fields = {
        "request": np.arange(rows),
        "context": np.full(rows, 100),
        "remaining": np.full(rows, 1000),
        "ceiling": np.full(shape, 8),
        "catchup": np.ones(shape, np.int64),
    }
    return View(PARTS, **fields | changes)


def many(request, **changes):
    return view(len(request), request=np.array(request), **changes)


def latency():
    """A step of 10 ms for up to 32 tokens; a draft at a tenth of it, another almost for nothing."""
    target = {t: STEP_S + 1e-4 * max(0, t - 32) for t in (1, 2, 4, 8, 16, 32, 64, 128)}
    shares = {"small": 0.1, "lookup": 1e-5}
    drafts = {
        name: LatencyTable.synthetic(name, {t: s * share for t, s in target.items()})
        for name, share in shares.items()
    }
    return LatencyModel.from_tables(LatencyTable.synthetic("target", target), drafts)


class Loop:
    """Steps of a planner of which planning takes ``planning_s``; up to ``most`` are accepted."""

    def __init__(self, planning_s, most=8, **config):
        settings = PlannerConfig(**{"explore_share": 0.0} | config)
        self.planner = AdaptivePlanner(PARTS, latency(), settings)
        self.most, self.now = most, 0.0
        self.state, self.planning_s = self.planner.start(), planning_s

    def step(self, seen=None, **parts_s):
        """Plan for a view and learn; return the plan and whether it was kept."""
        seen = view() if seen is None else seen
        plan, self.state = self.planner.plan(seen, self.state, self.now, RNG)
        again = "kept" in plan.notes
        parts_s = {"verify": STEP_S, "planning": 1e-6 if again else self.planning_s} | parts_s
        taken = np.minimum(plan.length, self.most)
        done = seen.request, plan.draft, plan.length, taken, taken + 1
        made = outcome_of(*done, plan.length, plan.length, STEP_S, parts_s)
        self.state = self.planner.observe(made, self.state, self.now)
        self.now += STEP_S
        return plan, again

    def settled(self, seen=None):
        """Return the loop when it has just planned anew, its estimates being steady."""
        for _ in range(200):
            self.step(seen)
        while self.step(seen)[1]:
            pass
        return self


@pytest.mark.parametrize(
    ("planning_s", "steps"), [(0.0, 0), (1e-4, 0), (5e-4, 2), (1e-3, 5), (1.0, FEW_STEPS)]
)
def test_a_choice_is_kept_until_planning_has_its_share_of_the_time(planning_s, steps):
    loop = Loop(planning_s, planning_share=0.02).settled()
    kept = [loop.step()[1] for _ in range(200)]
    again, planned = sum(kept), len(kept) - sum(kept)
    assert again / planned == pytest.approx(steps, abs=1.5)
    assert (again > 0) == (steps > 0)


@pytest.mark.medium
def test_learning_counts_like_planning():
    loop = Loop(1e-4, planning_share=0.02).settled()
    kept = [loop.step(learning=2e-4)[1] for _ in range(200)]
    assert 0 < sum(kept) < 200  # 0.3 ms where 0.2 ms may be taken
    assert not any(Loop(1e-4, planning_share=0.02).settled().step()[1] for _ in range(20))


def test_the_same_chains_are_proposed_in_kept_steps():
    loop = Loop(1.0).settled()
    first, again = loop.step()
    assert again
    second, again = loop.step()
    assert again
    assert first.length.any()
    assert second.draft.tolist() == first.draft.tolist()
    assert second.length.tolist() == first.length.tolist()


def test_chains_are_cut_to_what_can_be_proposed_and_to_what_remains():
    loop = Loop(1.0).settled()
    whole, _ = loop.step()
    assert whole.length.min() > 1
    cut, again = loop.step(replace(view(), remaining=np.array([2, 1, 1000])))
    assert again
    assert cut.length.tolist() == [1, 0, whole.length[2]]
    assert cut.draft[1] == -1


@pytest.mark.parametrize(
    "changed",
    [
        {"request": np.array([0, 1, 7])},
        {"prefill_tokens": 5, "prefilling": 1},
        {"cap_s": 1.0},
    ],
)
def test_few_are_planned_for_anew_when_anything_is_new(changed):
    loop = Loop(1.0).settled()
    assert loop.step()[1]
    assert not loop.step(replace(view(), **changed))[1]


def test_a_plan_is_for_what_the_drafts_find_and_matches_come_and_go():
    """For a few requests a match may be half of a step's tokens."""
    loop, none = Loop(1.0).settled(), np.array([[8, 0]] * ROWS)
    with_match, again = loop.step()
    assert again
    without, again = loop.step(replace(view(), ceiling=none))
    assert not again
    assert set(without.draft.tolist()) != set(with_match.draft.tolist())
    for seen, plan in ((view(), with_match), (replace(view(), ceiling=none), without)):
        found, again = loop.step(seen)
        assert again
        assert found.draft.tolist() == plan.draft.tolist()
    assert not all(loop.step()[1] for _ in range(2 * FEW_STEPS))


@pytest.mark.parametrize("rows", [1, ROWS])
def test_steps_with_a_kept_choice_are_learnt_from_together(rows):
    """They count as they would one by one, but that all fades from the end of the last of them."""
    states = []
    for planning_s in (0.0, 1.0):
        loop, seen = Loop(planning_s), view(rows)
        waiting = [loop.step(seen)[1] + len(loop.state.unlearnt) for _ in range(200)]
        assert (max(waiting) >= FEW_STEPS) == (planning_s > 0)
        states.append(loop.planner.admitted(seen, loop.state, loop.now).acceptance)
    one_by_one, together = states
    np.testing.assert_allclose(together.request_tokens, one_by_one.request_tokens, rtol=0.2)
    np.testing.assert_allclose(together.counts[1], one_by_one.counts[1], rtol=0.1)
    np.testing.assert_allclose(together.draft_hazard, one_by_one.draft_hazard, atol=0.02)


def test_what_waits_to_be_learnt_is_learnt_when_it_is_saved_and_when_a_plan_is_due():
    loop = Loop(1.0).settled()
    while len(loop.state.unlearnt) < 3:
        loop.step()
    reached = loop.state.acceptance.draft_reached.sum()
    saved = loop.planner.load(loop.planner.save(loop.state, loop.now), loop.now, 0.0)
    assert saved.acceptance.draft_reached.sum() > reached + 2
    others = replace(view(), request=np.arange(ROWS) + 10)
    _, state = loop.planner.plan(others, loop.state, loop.now, RNG)
    assert not state.unlearnt
    assert state.acceptance.draft_reached.sum() > reached + 2


def test_who_ends_without_a_step_is_forgotten_at_once():
    """A server whose requests come and are cancelled plans nothing: nothing must pile up."""
    loop = Loop(1.0).settled()
    loop.step()
    none = np.zeros(0, np.int64)
    gone = outcome_of(none, none, none, none, none, none, none, STEP_S, finished=np.arange(ROWS))
    state = loop.planner.observe(gone, loop.state, loop.now)
    assert not state.unlearnt
    assert not state.acceptance.slots


def test_many_keep_their_choices_whoever_comes_and_goes():
    loop = Loop(1.0).settled(many(range(MANY)))
    before, _ = loop.step(many(range(MANY)))
    plan, again = loop.step(many([0, 2, 3, 5, 7, 8]))
    assert again
    assert plan.draft.tolist()[:4] == before.draft[[0, 2, 3, 5]].tolist()
    assert plan.length.tolist()[:4] == before.length[[0, 2, 3, 5]].tolist()
    assert {7, 8} <= set(loop.state.acceptance.slots), "a newcomer's own evidence counts at once"


def test_a_newcomer_takes_the_choice_that_most_have():
    seen = many(range(5))
    plan = Plan(np.array([0, 1, -1, 1, 0]), np.array([3, 2, 0, 2, 4]), STEP_S)
    kept = Kept(seen.request.tobytes(), 5, {b"": plan}, Kept.drafts_found(seen).tobytes())
    after = kept.plan(many([4, 9, 0, 1]))
    assert after.draft.tolist() == [0, 1, 0, 1]
    assert after.length.tolist() == [4, 2, 3, 2]


def test_many_take_the_choice_of_those_whose_drafts_found_as_much():
    nothing, all_found = [8, 0], [8, 8]
    seen = many(range(5), ceiling=np.array([nothing, nothing, nothing, all_found, all_found]))
    plan = Plan(np.array([0, 0, 0, 1, 1]), np.array([1, 1, 2, 6, 6]), STEP_S)
    kept = Kept(seen.request.tobytes(), 5, {b"": plan}, Kept.drafts_found(seen).tobytes())
    now = np.array([all_found, nothing, nothing, nothing, all_found, all_found])
    after = kept.plan(many([0, 1, 2, 3, 4, 9], ceiling=now))
    assert after.draft.tolist() == [1, 0, 0, 0, 1, 1]
    assert after.length.tolist() == [6, 1, 2, 1, 6, 6]


@pytest.mark.parametrize(
    ("rows", "holds"), [(6, True), (4, True), (11, True), (3, False), (12, False)]
)
def test_many_are_planned_for_anew_when_they_are_few_or_twice_as_many(rows, holds):
    loop = Loop(1.0).settled(many(range(MANY)))
    assert loop.step(many(range(rows)))[1] == holds


def test_many_do_not_mind_what_the_drafts_find():
    """A row whose draft finds nothing speculates again once it does."""
    loop = Loop(1.0).settled(many(range(MANY)))
    plan, _ = loop.step(many(range(MANY)))
    nothing = np.full((MANY, 2), 8)
    nothing[0, plan.draft[0]] = 0
    plan, again = loop.step(many(range(MANY), ceiling=nothing))
    assert again
    assert plan.length[0] == 0 < plan.length[1]
    plan, again = loop.step(many(range(MANY)))
    assert again
    assert plan.length[0] > 0


def test_drafts_need_not_be_asked_while_a_large_batch_rests():
    """Whatever they find, it does not speculate: while it is about as large, until a plan is
    due.
    """
    costly = np.tile([8, 0], (MANY, 1))  # the small draft alone, never accepted
    loop, seen = Loop(1.0, most=0), many(range(MANY), ceiling=costly)
    loop.settled(seen)
    plan, _ = loop.step(seen)
    assert not plan.length.any()
    asked = [loop.planner.needs_offers(np.arange(n), loop.state) for n in (3, 4, MANY, 11, 12)]
    assert asked == [True, False, False, False, True]
    none = np.zeros((MANY, 2), np.int64)
    for _ in range(2 * MANY_STEPS):
        if loop.planner.needs_offers(seen.request, loop.state):
            break
        assert loop.step(replace(seen, ceiling=none, catchup=none))[1]
    assert loop.planner.needs_offers(seen.request, loop.state)


def test_drafts_are_asked_where_a_kept_choice_speculates():
    loop = Loop(1.0).settled(many(range(MANY)))
    assert loop.planner.needs_offers(np.arange(MANY), loop.state)


def test_chains_that_were_chosen_beside_a_prompt_are_not_kept():
    """Tokens beside a prompt cost little."""
    loop = Loop(1.0).settled(many(range(MANY)))
    loop.state = replace(loop.state, kept=None)
    plan, _ = loop.step(many(range(MANY), prefill_tokens=5))
    assert plan.length.any()
    assert not loop.step(many(range(MANY)))[1]


def test_planning_and_learning_are_in_no_prediction():
    drifts = []
    for own_s in (0.0, 5e-3):
        loop = Loop(own_s)
        for _ in range(50):
            loop.step(overhead=1e-4 + 2 * own_s, planning=own_s, learning=own_s)
        drifts.append(loop.planner.drift(loop.state)["overhead"])
    assert drifts[1] == pytest.approx(drifts[0])


def test_steps_with_a_kept_choice_tell_what_they_take():
    """They are most of the time, and quicker than one behind planning."""
    loop = Loop(1.0).settled()
    before = loop.planner.drift(loop.state)["verify"]
    slow = 0
    for _ in range(400):
        plan, loop.state = loop.planner.plan(view(), loop.state, loop.now, RNG)
        planned = "kept" not in plan.notes
        slow += planned
        done = view().request, plan.draft, plan.length, plan.length, plan.length + 1
        parts_s = {"verify": STEP_S * (2 if planned else 1), "planning": 1.0}
        made = outcome_of(*done, plan.length, plan.length, STEP_S, parts_s)
        loop.state = loop.planner.observe(made, loop.state, loop.now)
    assert 0 < slow < 60
    assert loop.planner.drift(loop.state)["verify"] < 1.5 * before


def test_a_share_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="planning_share must be > 0, got 0"):
        PlannerConfig(planning_share=0)


def test_while_another_plans_learning_keeps_to_its_share():
    loop, seen = Loop(0.0, planning_share=0.02), view()
    reached = []
    for _ in range(400):
        loop.state = loop.planner.stand_by(seen, loop.state)
        nothing = np.zeros(ROWS, np.int64)
        scored = np.full(ROWS, 2)
        made = outcome_of(
            *(seen.request, nothing - 1, nothing, nothing, nothing + 1, nothing, nothing),
            STEP_S,
            {"verify": STEP_S, "learning": 0.1 * STEP_S},
            free=FreeChains(seen.request, nothing + 1, scored, scored),
        )
        loop.state = loop.planner.observe(made, loop.state, loop.now)
        loop.now += STEP_S
        reached.append(float(loop.state.acceptance.draft_reached[1, 0]))
    learnt = np.count_nonzero(np.diff(reached))
    assert 0.1 < learnt / 400 < 0.3  # a tenth of a step each, where a fiftieth may be taken
    assert len(loop.state.unlearnt) < 10
    assert loop.state.acceptance.draft_hazard[1, :2].min() > 0.98  # it has seen them all
