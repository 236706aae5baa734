"""Where planning takes more of the time than it may, a choice is kept for some steps."""

from dataclasses import replace

import numpy as np
import pytest

from policy import AdaptivePlanner, LatencyModel, LatencyTable, Outcome, Plan, PlannerConfig, View
from policy.goodput import Choice, no_speculation
from policy.keeping import MOST_STEPS, kept
from policy.problem import chains_s
from policy.promise import Promise

RNG = np.random.default_rng(0)
STEP_S = 0.01
ROWS = 3


def view(rows=ROWS, **changes):
    shape = (rows, 2)
    fields = {
        "request": np.arange(rows),
        "context": np.full(rows, 100),
        "remaining": np.full(rows, 1000),
        "ceiling": np.full(shape, 8),
        "catchup": np.ones(shape, np.int64),
        "ready": np.ones(rows, np.bool_),
    }
    return View(("small", "lookup"), **fields | changes)


def latency():
    """A step of 10 ms for up to 32 tokens; a draft at a tenth of it, and one that costs next to nothing."""
    target = {t: STEP_S + 1e-4 * max(0, t - 32) for t in (1, 2, 4, 8, 16, 32, 64, 128)}
    drafts = {name: LatencyTable.synthetic(name, {t: s * share for t, s in target.items()}) for name, share in (("d", 0.1), ("l", 1e-5))}
    return LatencyModel.from_tables(LatencyTable.synthetic("target", target), drafts)


class Loop:
    """Steps of a planner whose planning takes ``planning_s`` when it plans; of what is proposed up to ``most`` is accepted."""

    def __init__(self, planning_s, most=8, **config):
        self.planner = AdaptivePlanner(("small", "lookup"), latency(), PlannerConfig(**{"explore_share": 0.0} | config))
        self.most = most
        self.state, self.planning_s, self.now = self.planner.start(), planning_s, 0.0

    def step(self, seen=None):
        """Plan for a view and learn; return the plan and whether it was kept."""
        seen = view() if seen is None else seen
        plan, self.state = self.planner.plan(seen, self.state, self.now, RNG)
        again = "kept" in plan.notes
        parts_s = {"verify": STEP_S, "planning": 1e-6 if again else self.planning_s}
        taken = np.minimum(plan.length, self.most)
        done = seen.request, plan.draft, plan.length, taken, taken + 1
        made = Outcome(*done, plan.length, plan.length, STEP_S, parts_s)
        self.state, self.now = self.planner.observe(made, self.state, self.now), self.now + STEP_S
        return plan, again

    def settled(self):
        """Return the loop once it plans again, its estimates being steady."""
        for _ in range(200):
            self.step()
        while self.step()[1]:
            pass
        return self


@pytest.mark.parametrize(("planning_s", "steps"), [(0.0, 0), (1e-4, 0), (5e-4, 2), (1e-3, 5), (1.0, MOST_STEPS)])
def test_a_choice_is_kept_until_planning_has_its_share_of_the_time(planning_s, steps):
    loop = Loop(planning_s, planning_share=0.02).settled()
    again, planned = 0, 0
    while planned < 4:
        _, was_kept = loop.step()
        again, planned = again + was_kept, planned + (not was_kept)
    assert again / planned == pytest.approx(steps, abs=1)  # drafting makes the step somewhat longer than verifying
    assert (again > 0) == (steps > 0)
    assert again <= planned * MOST_STEPS


def test_what_is_kept_are_the_same_chains_cut_to_what_is_left_of_a_request():
    loop = Loop(1.0).settled()
    first, _ = loop.step(replace(view(), remaining=np.full(ROWS, 1000)))
    second, again = loop.step(replace(view(), remaining=np.array([1000, 3, 1])))
    assert again
    assert second.draft[0] == first.draft[0]
    assert second.length[0] == first.length[0] > 2
    assert second.length[1] == min(first.length[1], 2)
    assert second.length[2] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"request": np.arange(ROWS) + 1},
        {"prefill_tokens": 5},
        {"cap_s": 0.5},
        {"ready": np.array([True, True, False])},
        {"ceiling": np.array([[8, 8], [8, 8], [8, 0]])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_step_unlike_the_last_one_is_planned_for(changes):
    loop = Loop(1.0).settled()
    assert loop.step()[1]
    assert not loop.step(replace(view(), **changes))[1]


@pytest.mark.parametrize("rows", [1, ROWS])
def test_what_a_plan_tries_out_is_not_kept(rows):
    """It was paid for once; what is kept is the choice beside it."""
    loop, seen, probes = Loop(1.0, most=1, explore_share=0.05), view().of_rows(np.arange(rows)), 0
    for _ in range(300):
        plan, again = loop.step(seen)
        if plan.notes.get("probe") and not again and loop.state.kept:
            probes += 1
            after, again = loop.step(seen)
            assert again
            assert not after.notes.get("probe")
            assert (after.draft.tolist(), after.length.tolist()) != (plan.draft.tolist(), plan.length.tolist())
    assert probes > 2


def test_first_choices_are_not_kept_for_long():
    """They are made of hardly any evidence."""
    loop, steps = Loop(1e-3, planning_share=0.01), []
    for _ in range(100):
        _, again = loop.step()
        steps = [*steps[:-1], steps[-1] + 1] if again else [*steps, 0]
    assert steps[:2] == [0, 0]
    assert steps[:-1] == sorted(steps[:-1])
    assert steps[-2] > 3


def test_a_kept_step_tells_nothing_of_what_planning_takes():
    loop = Loop(1e-3).settled()
    before = loop.state.planning_s
    assert loop.step()[1]
    assert loop.state.planning_s == before


def test_learning_from_a_planned_step_counts_as_planning():
    """The step behind it tells how long it took."""
    loop = Loop(1e-4, planning_share=0.02).settled()
    assert loop.state.kept is None
    seen, most = view(), 0
    for _ in range(200):
        plan, loop.state = loop.planner.plan(seen, loop.state, loop.now, RNG)
        parts_s = {"verify": STEP_S, "planning": 1e-4, "learning": 1e-3}
        done = seen.request, plan.draft, plan.length, plan.length, plan.length + 1
        made = Outcome(*done, plan.length, plan.length, STEP_S, parts_s)
        loop.state = loop.planner.observe(made, loop.state, loop.now)
        most = max(most, loop.state.kept.steps if loop.state.kept else 0)
    assert most == 5  # 1.1 ms at 2 % of 10 ms


@pytest.mark.parametrize("rows", [1, ROWS])
def test_steps_with_a_kept_choice_are_learnt_from_together(rows):
    """What they count for is what they would have one by one, but that it all fades from the end of the last of them."""
    states = []
    for planning_s in (0.0, 1.0):
        loop = Loop(planning_s)
        seen = view().of_rows(np.arange(rows))
        waiting = [loop.step(seen)[1] + len(loop.state.unlearnt) for _ in range(200)]
        assert (max(waiting) > MOST_STEPS) == (planning_s > 0)
        states.append(loop.planner.admitted(seen, loop.state, loop.now))
    one_by_one, together = states
    np.testing.assert_allclose(together.request_tokens, one_by_one.request_tokens, rtol=0.2)
    np.testing.assert_allclose(together.counts[1], one_by_one.counts[1], rtol=0.1)
    np.testing.assert_allclose(together.draft_hazard, one_by_one.draft_hazard, atol=0.02)


def test_what_waits_to_be_learnt_is_saved_and_is_learnt_when_a_request_ends():
    loop = Loop(1.0).settled()
    while len(loop.state.unlearnt) < 3:
        loop.step()
    reached = loop.state.acceptance.draft_reached.sum()
    assert np.sum(loop.planner.save(loop.state, loop.now)["draft_reached"]) > reached + 2
    seen = view()
    plan, state = loop.planner.plan(seen, loop.state, loop.now, RNG)
    done = seen.request, plan.draft, plan.length, plan.length, plan.length + 1, plan.length
    told = Outcome(*done, plan.length, STEP_S, finished=seen.request)
    state = loop.planner.observe(told, state, loop.now)
    assert len(state.unlearnt) == 4
    others = loop.planner.admitted(replace(view(), request=np.arange(ROWS) + 10), state, loop.now)
    assert set(others.slots) == {10, 11, 12}
    assert others.draft_reached.sum() > reached + 2


def test_a_plan_is_for_what_the_drafts_find_and_matches_come_and_go():
    """For a few requests a match may be half of a step's tokens, but the last plan for it is as good as when it was made."""
    loop, none = Loop(1.0).settled(), np.array([[8, 0]] * ROWS)
    with_match, again = loop.step()
    assert again
    without, again = loop.step(replace(view(), ceiling=none))
    assert not again
    assert set(without.draft.tolist()) != set(with_match.draft.tolist())
    for seen, plan in ((view(), with_match), (replace(view(), ceiling=none), without)):
        found, again = loop.step(seen)
        assert again
        assert (found.draft.tolist(), found.length.tolist()) == (plan.draft.tolist(), plan.length.tolist())
    assert not all(loop.step()[1] for _ in range(MOST_STEPS - 1))


def test_who_ends_without_a_step_is_forgotten_at_once():
    """A server that only sees requests come and be cancelled plans nothing: what waits to be learnt must not grow."""
    loop = Loop(1.0).settled()
    loop.step()
    none = np.zeros(0, np.int64)
    gone = Outcome(none, none, none, none, none, none, none, STEP_S, finished=np.arange(ROWS))
    state = loop.planner.observe(gone, loop.state, loop.now)
    assert not state.unlearnt
    assert not state.acceptance.slots


MANY = 6


def many(request, **changes):
    return view(len(request), request=np.array(request), **changes)


def settled_many():
    loop, seen = Loop(1.0), many(range(MANY))
    for _ in range(200):
        loop.step(seen)
    while loop.step(seen)[1]:
        pass
    return loop


def test_many_keep_their_choices_whoever_comes_and_goes():
    loop = settled_many()
    before = loop.state.kept.plan
    plan, again = loop.step(many([0, 2, 3, 5, 7, 8]))
    assert again
    assert plan.draft.tolist()[:4] == before.draft[[0, 2, 3, 5]].tolist()
    assert plan.length.tolist()[:4] == before.length[[0, 2, 3, 5]].tolist()
    assert {7, 8} <= set(loop.state.acceptance.slots), "a newcomer's own evidence counts from its first step on"


def test_a_newcomer_takes_the_choice_that_most_have():
    seen = many(range(5))
    plan = Plan(np.array([0, 1, -1, 1, 0]), np.array([3, 2, 0, 2, 4]), STEP_S)
    after, left = kept(plan, seen, np.zeros((9, len(seen))), 1.0, 0.02, 4).next_step(many([4, 9, 0, 1]))
    assert after.draft.tolist() == [0, 1, 0, 1]
    assert after.length.tolist() == [4, 2, 3, 2]
    assert left.next_step(many([9, 0, 1, 4]))[0].length.tolist() == [2, 3, 2, 4]


@pytest.mark.parametrize(("rows", "holds"), [(6, True), (4, True), (11, True), (3, False), (12, False)])
def test_many_are_planned_for_anew_when_they_have_become_few_or_twice_as_many(rows, holds):
    assert settled_many().step(many(range(rows)))[1] == holds


def test_many_do_not_mind_what_the_drafts_find():
    """A row whose draft finds nothing speculates again once it does."""
    loop = settled_many()
    drafts = loop.state.kept.plan.draft
    nothing = np.full((MANY, 2), 8)
    nothing[0, drafts[0]] = 0
    plan, again = loop.step(many(range(MANY), ceiling=nothing))
    assert again
    assert plan.length[0] == 0 < plan.length[1]
    plan, again = loop.step(many(range(MANY)))
    assert again
    assert plan.length[0] > 0


def test_what_is_left_of_a_kept_choice_is_to_pay_by_itself():
    """Speculation for the whole batch paid for the draft's forwards; for one row of it they take more than it gains."""
    loop = settled_many()
    loop.state = replace(loop.state, correction=loop.state.correction * np.array([1.0, 1.0, 8.0, 1.0]))
    seen, draft = many(range(MANY)), np.zeros(MANY, np.int64)
    chains = Plan(draft, np.full(MANY, 2), 2 * STEP_S, 3.0 * MANY, notes={"gain": 2.0})
    accepted = np.minimum(np.arange(9), 2)[:, None] * np.ones(MANY)
    one = np.zeros((MANY, 2), np.int64)
    one[0] = 8
    for ceiling, speculate in ((np.full((MANY, 2), 8), MANY), (one, 0)):
        loop.state = replace(loop.state, kept=kept(chains, seen, accepted, 1.0, 0.02, 4), promise=Promise())
        before = loop.state
        plan, again = loop.step(replace(seen, ceiling=ceiling))
        assert again
        assert np.count_nonzero(plan.length) == speculate
    assert plan.predicted_tokens == MANY
    assert plan.predicted_s == chains_s(loop.planner.corrected(before), before.correction, seen, no_speculation(MANY))


def test_what_is_left_of_a_kept_choice_is_predicted_anew():
    loop = settled_many()
    whole, again = loop.step(many(range(MANY)))
    assert again
    half = np.full((MANY, 2), 8)
    half[: MANY // 2] = 1
    less, again = loop.step(many(range(MANY), ceiling=half))
    assert again
    assert less.length.tolist() == [1] * (MANY // 2) + whole.length[MANY // 2 :].tolist()
    assert MANY < less.predicted_tokens < whole.predicted_tokens
    assert 0.5 * whole.predicted_s < less.predicted_s < whole.predicted_s


@pytest.mark.parametrize("rows", [4, 11])
def test_a_kept_choice_is_predicted_for_those_who_are_there(rows):
    """Else a batch that shrinks or grows would seem to break what was promised."""
    loop = settled_many()
    before, seen = loop.state, many(range(rows))
    plan, again = loop.step(seen)
    assert again
    assert plan.length.all()
    assert plan.predicted_s == chains_s(loop.planner.corrected(before), before.correction, seen, Choice(plan.draft, plan.length))
    assert plan.predicted_tokens == pytest.approx(before.kept.plan.predicted_tokens * rows / MANY, rel=0.05)


def test_drafts_need_not_be_asked_while_a_large_batch_rests():
    """Whatever they find, it does not speculate: while it is about as large, and until its steps are over."""
    loop = Loop(1.0, most=0).settled()
    seen = many(range(MANY))
    for _ in range(100):
        plan, _ = loop.step(seen)
    while loop.state.kept.steps < 3:
        loop.step(seen)
    assert not plan.length.any()
    assert [loop.planner.needs_offers(np.arange(rows), loop.state) for rows in (3, 4, MANY, 11, 12)] == [True, False, False, False, True]
    while loop.state.kept.steps:
        unasked = replace(seen, ceiling=np.zeros((MANY, 2), np.int64), catchup=np.zeros((MANY, 2), np.int64))
        assert not loop.planner.needs_offers(seen.request, loop.state)
        assert loop.step(unasked)[1]
    assert loop.planner.needs_offers(seen.request, loop.state)


def test_drafts_are_asked_where_a_kept_choice_speculates():
    loop = settled_many()
    assert loop.state.kept.plan.length.any()
    assert loop.planner.needs_offers(np.arange(MANY), loop.state)


def test_chains_that_were_chosen_beside_a_prompt_are_not_kept():
    """Tokens beside a prompt cost little."""
    chains = Plan(np.zeros(MANY, np.int64), np.full(MANY, 2), STEP_S)
    assert kept(chains, many(range(MANY)), np.zeros((9, MANY)), 1.0, 0.02, 4) is not None
    assert kept(chains, many(range(MANY), prefill_tokens=5), np.zeros((9, MANY)), 1.0, 0.02, 4) is None


def test_planning_and_learning_are_in_no_prediction():
    loops = [Loop(planning_s) for planning_s in (0.0, 5e-3)]
    for loop in loops:
        for _ in range(50):
            seen = view()
            plan, loop.state = loop.planner.plan(seen, loop.state, loop.now, RNG)
            parts_s = {"verify": STEP_S, "overhead": 1e-4 + 2 * loop.planning_s, "planning": loop.planning_s, "learning": loop.planning_s}
            done = seen.request, plan.draft, plan.length, plan.length, plan.length + 1
            made = Outcome(*done, plan.length, plan.length, STEP_S, parts_s)
            loop.state = loop.planner.observe(made, loop.state, loop.now)
    without, with_planning = (loop.planner.drift(loop.state)["overhead"] for loop in loops)
    assert with_planning == pytest.approx(without)


def test_steps_with_a_kept_choice_tell_what_they_take():
    """They are most of the time, and quicker than one behind planning."""
    loop = Loop(1.0).settled()
    before, slow = loop.planner.drift(loop.state)["verify"], 0
    for _ in range(400):
        seen = view()
        plan, loop.state = loop.planner.plan(seen, loop.state, loop.now, RNG)
        slow += (planned := "kept" not in plan.notes)
        parts_s = {"verify": STEP_S * (2 if planned else 1), "planning": 1.0}
        done = seen.request, plan.draft, plan.length, plan.length, plan.length + 1
        made = Outcome(*done, plan.length, plan.length, STEP_S, parts_s)
        loop.state = loop.planner.observe(made, loop.state, loop.now)
    assert 0 < slow < 60
    assert loop.planner.drift(loop.state)["verify"] < 1.5 * before


def test_a_share_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="planning_share must be > 0, got 0"):
        PlannerConfig(planning_share=0)


@pytest.mark.parametrize("extra", [0.0, 0.004, 1.0])
def test_a_probe_that_takes_longer_than_predicted_is_paid_for(extra):
    """The look for it, and a draft that was in no cache; a pause of the machine counts for a step at most."""
    loop, seen = Loop(0.0, most=1, explore_share=0.05), view()
    for _ in range(300):
        plan, state = loop.planner.plan(seen, loop.state, loop.now, RNG)
        taken = np.minimum(plan.length, 1)
        if plan.notes.get("probe"):
            break
        took_s = plan.predicted_s
        done = seen.request, plan.draft, plan.length, taken, taken + 1
        made = Outcome(*done, plan.length, plan.length, took_s, {"verify": took_s})
        loop.state, loop.now = loop.planner.observe(made, state, loop.now), loop.now + took_s
    assert state.trial_s == pytest.approx(plan.predicted_s)
    took_s = plan.predicted_s + extra
    done = seen.request, plan.draft, plan.length, taken, taken + 1
    made = Outcome(*done, plan.length, plan.length, took_s, {"verify": took_s})
    after = loop.planner.observe(made, state, loop.now)
    assert after.credit_s == pytest.approx(state.credit_s - min(extra, plan.predicted_s))
    assert not after.trial_s
