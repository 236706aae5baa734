import numpy as np
import pytest

from bench.baselines.spin import SpinSelection
from policy import (
    NO_DRAFT,
    LatencyCurve,
    LatencyModel,
    Plan,
)
from policy.baselines import (
    BASELINES,
    AcceptanceEma,
    BaselineSettings,
    BatchSchedule,
    GatedSchedule,
    GateState,
    SmartSpec,
    expected_tokens,
)
from tests.fakes import policies as fakes
from tests.fakes.policies import RNG

DRAFTS = ("a", "b")
# Llama-8B on an H100 with an EAGLE draft, context 512: published coefficients, their token term and
# constant alone.
TOKENS = np.arange(513)
H100 = LatencyModel(
    LatencyCurve(6.94e-3 + 1.84e-5 * TOKENS, 1.84e-5),
    (LatencyCurve(4.6e-4 + 5.5e-6 * TOKENS, 5.5e-6),) * 2,
    0.0,
    8e-4,
)


def view(rows, ceiling=8):
    return fakes.view(rows, DRAFTS, k=ceiling, context=512)


def outcome(plan, accepted, finished=(), parts_s=None):
    seen, finished = view(len(plan.length)), np.array(finished, np.int64)
    parts_s = parts_s or {"verify": 1.0}
    return fakes.outcome(seen, plan, accepted, parts_s=parts_s, finished=finished)


def run(policy, rows, steps, accepted):
    """Return the lengths that a policy chooses while every row has up to ``accepted`` tokens
    accepted (a number or a function of step).
    """
    state, lengths = policy.start(), []
    for step in range(steps):
        plan, state = policy.plan(view(rows), state, 0.0, RNG)
        lengths.append(int(plan.length.max(initial=0)))
        state = policy.observe(
            outcome(plan, accepted(step) if callable(accepted) else accepted), state, 0.0
        )
    return lengths


def test_a_schedule_takes_the_first_range_that_holds_the_batch_and_beyond_the_last_none():
    schedule = BatchSchedule("b", {8: 2, 4: 4, 32: 1})
    lengths = [
        int(schedule.plan(view(rows), None, 0.0, RNG)[0].length[0])
        for rows in (1, 4, 5, 8, 9, 32, 33)
    ]
    assert lengths == [4, 4, 2, 2, 1, 1, 0]
    with pytest.raises(ValueError, match="0: 3"):
        BatchSchedule("b", {0: 3})


@pytest.mark.parametrize(
    ("alpha", "length", "tokens"), [(0.5, 0, 1.0), (0.5, 2, 1.75), (0.9, 8, (1 - 0.9**9) / 0.1)]
)
def test_expected_tokens_are_the_geometric_sum(alpha, length, tokens):
    assert expected_tokens(alpha, length) == pytest.approx(tokens)


def gated(rows, steps, accepted, **options):
    """Return the lengths of a table of 4 tokens whose gate these options set."""
    return run(GatedSchedule("b", {64: 4}, **options), rows, steps, accepted)


@pytest.mark.parametrize(
    ("accepted", "lengths"),
    [
        (4, [4] * 12),
        (1, [4] * 12),  # a rate of 25 %
        (0, [4] * 5 + [0] * 7),  # closed once the window is full
        (lambda step: 0 if step < 4 else 4, [4] * 12),  # 20 % at the first full window
        (lambda step: 4 if step == 0 else 0, [4] * 6 + [0] * 6),  # the good step leaves the window
        (lambda step: 0 if step < 5 else 4, [4] * 5 + [0] * 7),  # it never opens again
    ],
)
def test_the_gate_closes_for_good_once_the_mean_rate_of_a_window_is_too_low(accepted, lengths):
    assert gated(3, 12, accepted, window=5, percent=20) == lengths


def test_the_gate_counts_one_rate_a_step_over_all_rows_and_none_without_proposals():
    policy = GatedSchedule("b", {64: 4}, window=2, percent=50)
    state = policy.start()
    plan, state = policy.plan(view(4), state, 0.0, RNG)
    after = policy.observe(outcome(plan, np.array([4, 4, 2, 0])), state, 0.0)
    assert after.rates == (10 / 16,)
    plan, _ = policy.plan(view(4, ceiling=0), after, 0.0, RNG)
    assert policy.observe(outcome(plan, 0), after, 0.0) == after


def test_after_a_closed_gate_no_draft_is_asked():
    policy, state = GatedSchedule("b", {64: 4}), GateState((), closed=True)
    assert policy.needs_ceilings(np.arange(3), policy.start())
    assert not policy.needs_ceilings(np.arange(3), state)
    assert policy.observe(outcome(Plan.within(view(2), 1, 4), 4), state, 0.0) == state


def test_smartspec_starts_from_a_rate_of_seven_tenths_and_speculates_less_in_larger_batches():
    lengths = [run(SmartSpec(DRAFTS, "a", H100), rows, 1, 0)[0] for rows in (1, 32, 128, 512)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] == 0


def test_smartspec_keeps_its_length_for_twenty_steps_and_then_follows_acceptance():
    lengths = run(SmartSpec(DRAFTS, "a", H100), 4, 61, 0)
    assert len(set(lengths[:20])) == 1
    assert lengths[0] > 0
    assert lengths[20:] == [0] * 41  # nothing was accepted
    assert run(SmartSpec(DRAFTS, "a", H100), 4, 21, 8)[20] == 8


def test_smartspec_once_off_never_learns_better():
    lengths = run(SmartSpec(DRAFTS, "a", H100), 4, 200, lambda step: 0 if step < 20 else 8)
    assert (
        lengths[20:] == [0] * 180
    )  # papers.md, trap T9: what the adaptive planner's probes are for


def test_smartspec_stops_its_scan_at_the_first_length_that_is_no_better():
    kinked = LatencyCurve(
        np.where(TOKENS < 2, 0.010, 0.0165), 0.0
    )  # one step up, then flat: of all lengths six would be best
    policy = SmartSpec(DRAFTS, "a", LatencyModel(kinked, H100.drafts))
    policy._target = kinked  # as a profiled table, which the code prefers to its line
    assert run(policy, 1, 1, 8) == [0]
    goodput = [expected_tokens(0.7, k) / (kinked.seconds(k + 1) + k * 5e-4) for k in range(9)]
    assert np.argmax(goodput) > 1


def test_smartspec_counts_a_rejection_once_per_chain():
    policy = SmartSpec(DRAFTS, "a", H100)
    state = policy.start()
    plan, state = policy.plan(view(2), state, 0.0, RNG)
    state = policy.observe(outcome(plan, np.array([1, 8])), state, 0.0)
    k = int(plan.length[0])
    assert state.window == ((1 + k, 1),)


def test_the_acceptance_ema_moves_through_the_candidates_both_ways():
    assert run(AcceptanceEma("a"), 1, 120, 8)[-1] == 7
    assert run(AcceptanceEma("a"), 1, 120, 0)[-1] == 1
    shifted = run(AcceptanceEma("a"), 1, 240, lambda step: 8 if step < 120 else 0)
    assert (shifted[119], shifted[-1]) == (7, 1)


def test_with_one_list_the_average_never_switches_off_and_moves_by_the_same_candidates():
    flat = BASELINES["ema-flat"].make(BaselineSettings(DRAFTS, H100, draft="a"))
    for rows in (1, 8, 64):
        assert run(flat, rows, 120, 8)[-1] == 7
        assert set(run(flat, rows, 120, 0)[60:]) == {1}


def test_in_larger_batches_the_acceptance_ema_may_switch_off_and_probe_again():
    off = run(AcceptanceEma("a"), 8, 120, 0)
    assert {0, 1} <= set(off[40:])
    assert set(run(AcceptanceEma("a"), 64, 40, 8)) == {0}


def test_spin_explores_at_random_then_keeps_the_draft_with_more_accepted_per_second():
    policy = SpinSelection(DRAFTS, H100, 8, length=4)
    state, chosen = policy.start(), []
    for _ in range(60):
        plan, state = policy.plan(view(6), state, 0.0, RNG)
        chosen.append(plan.draft.copy())
        accepted = np.where(
            (plan.draft == 1) == (np.arange(6) < 3), 3, 1
        )  # half of the requests like b, half a
        state = policy.observe(outcome(plan, accepted), state, 0.0)
        assert set(plan.length.tolist()) == {4}
    assert len({tuple(draft.tolist()) for draft in chosen[:20]}) == 4  # one random draw a slot
    assert {tuple(draft.tolist()) for draft in chosen[20:]} == {(1, 1, 1, 0, 0, 0)}


def test_spin_forgets_what_has_finished_and_gives_a_newcomer_the_workload_s_best():
    policy = SpinSelection(DRAFTS, H100, 8, length=4)
    state = policy.start()
    for _ in range(40):
        plan, state = policy.plan(view(4), state, 0.0, RNG)
        state = policy.observe(outcome(plan, np.where(plan.draft == 1, 3, 0)), state, 0.0)
    state = policy.observe(outcome(plan, 3, finished=[0, 1]), state, 0.0)
    assert set(state.by_request) == set(state.assigned) == {2, 3}
    plan, _ = policy.plan(view(4), state, 0.0, RNG)
    assert plan.draft[0] == 1


def test_spin_charges_a_draft_for_its_time():
    policy = SpinSelection(DRAFTS, H100, 8, length=4)
    state = policy.start()
    for _ in range(40):
        plan, state = policy.plan(view(4), state, 0.0, RNG)
        accepted = np.where(plan.draft == 1, 3, 2)
        state = policy.observe(
            outcome(plan, accepted, parts_s={"verify": 1.0, "draft:a": 0.1, "draft:b": 2.0}),
            state,
            0.0,
        )
    assert set(plan.draft.tolist()) == {0}


PUBLISHED = [
    SmartSpec(DRAFTS, "a", H100),
    AcceptanceEma("a"),
    SpinSelection(DRAFTS, H100, 8, length=3),
    GatedSchedule("a", {8: 3}),
]


@pytest.mark.parametrize("policy", PUBLISHED)
def test_an_empty_batch_is_planned_and_ceilings_are_kept(policy):
    plan, state = policy.plan(view(0), policy.start(), 0.0, RNG)
    assert len(plan.length) == 0
    policy.observe(outcome(plan, 0), state, 0.0)
    assert policy.drift(state) == {}
    plan, _ = policy.plan(view(3, ceiling=0), policy.start(), 0.0, RNG)
    assert plan.draft.tolist() == [NO_DRAFT] * 3
