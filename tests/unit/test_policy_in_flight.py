"""What the planner makes of rows in flight in the batch that its step joins, at latencies like
those of an 8B target on an H200.
"""

from dataclasses import replace

import numpy as np
import pytest

from policy import BatchSchedule, LatencyCurve, LatencyModel, Outcome, Plan, Ran
from policy.latency import Correction
from policy.problem import predicted_parts
from policy.replay import decoded, encoded
from tests.unit.test_policy_planner import RNG, certain, planner, view

DRAFT = ("small",)


def line(fixed_s, token_s, flat_tokens=64):
    return LatencyCurve(fixed_s + token_s * np.maximum(np.arange(2049) - flat_tokens, 0), token_s)


H200 = LatencyModel(line(5e-3, 20e-6), (line(0.8e-3, 2.5e-6),))


def settled(rate, rows, steps=20):
    """The planner, its state and its plan for a batch that is planned for at once."""
    made = planner(H200, DRAFT, **certain(rate))
    state = made.start()
    for _ in range(steps):
        plan, state = made.plan(view(rows, DRAFT), state, 0.0, RNG)
    return made, state, plan


def in_flight(rows, ready, draft, length):
    """The view of the batch of which the first rows are ready and the others as they were
    planned.
    """
    seen = view(rows, DRAFT)
    in_flight = np.arange(ready, rows)
    return seen.of_rows(np.arange(ready)).beside(
        seen.of_rows(in_flight), Plan(draft[in_flight], length[in_flight])
    )


@pytest.mark.parametrize("ready", [1, 3, 12])
@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8])
@pytest.mark.parametrize("rows", [32, 128])
def test_few_ready_rows_of_a_busy_batch_get_what_they_would_in_a_batch_planned_at_once(
    rows, rate, ready
):
    made, state, together = settled(rate, rows)
    seen = in_flight(rows, ready, together.draft, together.length)
    shown, _ = made.plan(seen, state, 0.0, RNG)
    assert not shown.length[ready:].any()
    assert abs(shown.length[:ready].mean() - together.length.mean()) <= 1.0
    assert shown.predicted_s == pytest.approx(together.predicted_s, rel=0.15)
    alone, unseen = made.start(), view(ready, DRAFT)
    for _ in range(20):
        hidden, alone = made.plan(unseen, alone, 0.0, RNG)
    if ready < 12:
        assert (
            hidden.length.mean() >= together.length.mean() + 1.0
        )  # a batch of so few would speculate more


def test_what_is_in_flight_is_in_the_price_as_it_was_planned():
    made, state, _ = settled(0.8, 32)
    nothing = in_flight(32, 4, np.full(32, -1), np.zeros(32, np.int64))
    much = in_flight(32, 4, np.zeros(32, np.int64), np.full(32, 8))
    few, many = (made.plan(seen, state, 0.0, RNG)[0] for seen in (nothing, much))
    assert many.predicted_s > few.predicted_s + 28 * 8 * 20e-6 * 0.8
    assert many.predicted_tokens > few.predicted_tokens + 28
    assert many.length[:4].mean() < few.length[:4].mean()


def test_a_draft_that_ran_for_rows_in_flight_is_no_cheaper_to_join():
    """Unlike rows whose choice is given in this step: those in flight have been drafted for."""
    model = LatencyModel(line(5e-3, 0.0), (line(2.5e-3, 0.0),))
    made = planner(model, DRAFT, **certain(0.7))
    drafted = in_flight(8, 1, np.zeros(8, np.int64), np.full(8, 8))
    control = replace(
        view(8, DRAFT),
        control=np.arange(8) > 0,
        control_plan=Plan(np.zeros(8, np.int64), np.where(np.arange(8) > 0, 8, 0)),
    )
    joining, _ = made.plan(control, made.start(), 0.0, RNG)
    assert joining.length[0] >= made.plan(drafted, made.start(), 0.0, RNG)[0].length[0]


def test_a_schedule_counts_who_is_in_flight():
    seen = in_flight(32, 3, np.full(32, -1), np.zeros(32, np.int64))
    assert BatchSchedule("small", {4: 5, 64: 2}).plan(seen, None, 0.0, RNG)[0].length[
        :3
    ].tolist() == [2, 2, 2]


def test_views_with_rows_in_flight_survive_a_trace():
    seen = in_flight(6, 2, np.zeros(6, np.int64), np.full(6, 3))
    again = decoded(encoded(seen))
    assert again.in_flight.length.tolist() == [0, 0, 3, 3, 3, 3]
    assert encoded(again) == encoded(seen)


def test_times_are_those_of_what_ran_and_not_of_who_is_back():
    seen = in_flight(6, 2, np.zeros(6, np.int64), np.full(6, 3))
    back, none = np.array([4, 5]), np.zeros(2, np.int64)
    ran = Ran(
        np.array([0, 1]),
        np.zeros(2, np.int64),
        np.array([2, 2]),
        tokens=200,
        rows=9,
        context_tokens=900,
    )
    told = Outcome(back, none, none + 3, none + 3, none + 4, none + 3, none + 3, 1.0, ran=ran)
    times = Correction.start(1).times(H200)
    predicted = predicted_parts(times, told, seen)
    assert predicted.parts[0] == pytest.approx(H200.target.seconds(200, 9, 900))
    assert predicted.parts[2] == pytest.approx(2 * H200.drafts[0].at(2))
    assert predicted.tokens == 200
    untimed = predicted_parts(times, replace(told, ran=replace(ran, tokens=0)), seen)
    assert (untimed.parts[0], untimed.tokens) == (0.0, 0)
    made = planner(H200, DRAFT)
    state = made.observe(
        replace(told, ran=replace(ran, tokens=0), parts_s={"overhead": 1e-4}),
        made.stand_by(seen, made.start()),
        0.0,
    )
    assert made.drift(state)["verify"] == 1.0
