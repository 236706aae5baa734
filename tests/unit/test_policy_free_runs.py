"""How many tokens a turn without a proposal runs: by what a turn costs, against the next plan."""

import json

import numpy as np
import pytest

from policy import AdaptivePlanner, LatencyError, LatencyModel, LatencyTable, PlannerConfig
from policy.free_runs import FreeRuns, free_run_tokens
from tests.unit.test_policy_planner import DRAFTS, RNG, certain, latency, planner, view

CONSTANTS = {"token_s": 0.01, "most": 64}


def cost_s(tokens, turn_s, wait_s):
    if tokens == 1:
        return turn_s
    return (turn_s + wait_s) / tokens + 0.03 * CONSTANTS["token_s"] / 4 * (tokens - 1) / 2


@pytest.mark.parametrize("wait_s", [0.0, 0.01])
@pytest.mark.parametrize("turn_s", [1e-5, 1e-4, 1e-3, 5e-3, 2e-2])
def test_it_is_about_the_cheapest_number(turn_s, wait_s):
    chosen = free_run_tokens(turn_s, wait_s=wait_s, **CONSTANTS)
    assert cost_s(chosen, turn_s, wait_s) < 1.03 * min(
        cost_s(tokens, turn_s, wait_s) for tokens in range(1, 65)
    )


@pytest.mark.parametrize("wait_s", [0.0, 0.01])
def test_it_grows_with_the_overhead_from_one_to_the_most(wait_s):
    runs = [
        free_run_tokens(turn_s, wait_s=wait_s, **CONSTANTS) for turn_s in np.linspace(0, 0.2, 50)
    ]
    assert runs == sorted(runs)
    assert (runs[0], runs[-1]) == (1, 64)


def test_a_small_overhead_is_not_worth_ending_apart():
    assert free_run_tokens(0.5e-3, wait_s=0.01, **CONSTANTS) == 1
    assert free_run_tokens(0.5e-3, wait_s=0.0, **CONSTANTS) > 2


@pytest.mark.parametrize("turn_s", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_a_row_that_rests_runs_and_speculation_has_to_beat_that(rows, turn_s):
    base = latency()
    model = LatencyModel(base.target, base.drafts, turn_s=turn_s)
    resting = AdaptivePlanner(DRAFTS, model, PlannerConfig(**certain(0.02)), FreeRuns(8))
    state = resting.start()
    for _ in range(3):  # the third time at rest, where there are enough rows
        plan, state = resting.plan(view(rows), state, 0.0, RNG)
        assert not plan.length.any()
        step_s = base.target.seconds(rows)
        wait_s = (step_s - turn_s) * (rows > 1)
        assert plan.run.tolist() == [free_run_tokens(turn_s, step_s - turn_s, wait_s, 8)] * rows
    m = plan.run[0]
    assert plan.predicted_s == pytest.approx(step_s - turn_s + (turn_s + wait_s * (m > 1)) / m)
    assert (
        planner(model, **certain(0.02)).plan(view(rows), resting.start(), 0.0, RNG)[0].run is None
    )


def test_where_long_runs_save_more_than_speculation_brings_there_is_none():
    base = latency()
    model = LatencyModel(base.target, base.drafts, turn_s=0.8)
    for most, speculates in ((1, True), (16, False)):
        made = AdaptivePlanner(DRAFTS, model, PlannerConfig(**certain(0.6)), FreeRuns(most))
        assert bool(made.plan(view(), made.start(), 0.0, RNG)[0].length.any()) == speculates


def test_a_table_keeps_what_a_turn_takes():
    table = LatencyTable("target", (1, 1), (1, 4), (0, 0), (0.01, 0.01), turn_s=0.002)
    again = LatencyTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again == table
    assert LatencyModel.from_tables(again, {}).turn_s == 0.002
    assert "turn_s" not in LatencyTable.synthetic("target", {1: 0.01}).to_dict()
    with pytest.raises(
        LatencyError, match="turn_s of engine 'target' must be a finite number >= 0, got -1"
    ):
        LatencyTable.from_dict({**table.to_dict(), "turn_s": -1})
