import pytest

from bench.sweep import figures as sweep_figures
from bench.sweep.arms import AGAIN
from bench.sweep.figures import BEST_FIXED, EVERY


def run(policy, block, seconds, load="closed-2", tokens=10):
    reply = {
        "output_tokens": tokens,
        "drafted": 8,
        "accepted": 6,
        "first_s": 0.1,
        "total_s": seconds,
        "token_s": 0.01,
        "late_s": 0.0,
        "repeated_4grams": 0.0,
        "text": "",
    }
    counts = {
        'spindle_draft_tokens_by_position_total{draft="d",position="1"}': 4.0,
        'spindle_accepted_tokens_by_position_total{draft="d",position="1"}': 3.0,
        **{
            f'spindle_step_part_seconds_total{{part="{part}"}}': s
            for part, s in (("planning", 1.0), ("learning", 0.5), ("verify", 6.0), ("rest", 2.5))
        },
        'spindle_emitted_tokens_total{draft="d",arm="planner"}': 10.0,
        "spindle_step_seconds_sum": 4.0,
        "spindle_step_seconds_count": 2.0,
        "spindle_step_predicted_seconds_sum": 3.0,
        "spindle_step_predicted_seconds_count": 2.0,
        "spindle_batch_size_sum": 6.0,
        "spindle_batch_size_count": 4.0,
    }
    shape = {"workload": "mix", "load": load, "block": block, "policy": policy}
    return {**shape, "wall_s": seconds, "gap_p99_s": 0.02, "replies": [reply], "counts": counts}


def test_what_a_part_brings_is_the_speed_with_it_over_that_without_it():
    policies = ["none", "spindle", "with-prefix-reuse", "without-d-1"]
    runs = [
        run(policy, block, seconds)
        for block in (0, 1, 2)
        for policy, seconds in zip(policies, (2, 1, 4, 2), strict=True)
    ]
    rows = sweep_figures.ablations(sweep_figures.blocks(runs, policies), policies)
    assert [(row["part"], row["by_default"], row["ratio"]) for row in rows] == [
        ("prefix-reuse", False, 0.25),
        ("d-1", True, 2.0),
    ]


def test_a_ratio_is_that_within_blocks_and_a_block_that_lacks_a_policy_does_not_count():
    runs = [
        run(policy, block, seconds)
        for block in (0, 1, 2)
        for policy, seconds in (("none", 2.0 + block), ("spindle", 1.0 + block / 2))
    ]
    runs.append(run("spindle", 3, 9.0))
    found = sweep_figures.blocks(runs, ["none", "spindle"])
    assert list(found["mix", "closed-2"]) == [0, 1, 2]
    (row,) = sweep_figures.compare(found, ["none", "spindle"])
    assert (row["policy"], row["over"], row["blocks"]) == ("spindle", "none", 2)
    assert row["ratio"] == pytest.approx(2.0)
    assert row["interval_95"] == (2.0, 2.0)


def test_a_machine_that_slows_down_within_a_block_favours_no_policy_over_the_two_runs_of_none():
    took = {"none": 1.0, "spindle": 2.0, AGAIN: 4.0}
    found = sweep_figures.blocks(
        [run(policy, block, seconds) for block in (0, 1) for policy, seconds in took.items()],
        list(took),
    )
    (row,) = sweep_figures.compare(found, list(took))
    assert row["ratio"] == pytest.approx(1.0)
    assert [row["ratio"] for row in sweep_figures.noise(found)] == [0.25]
    plain = sweep_figures.summary(found, list(took))[0]
    assert (plain["mean_latency_s"], plain["requests"]) == (
        2.5,
        2 * len(run("none", 1, 1.0)["replies"]),
    )


def test_of_several_workloads_every_block_of_any_is_a_pair_of_all_together():
    policies = ["none", "fixed-a-2", "fixed-b-2", "spindle", AGAIN]
    seconds = {"chat": (4.0, 3.0, 4.0, 2.0, 4.0), "sql": (8.0, 6.0, 8.0, 1.0, 4.0)}
    runs = [
        {**run(policy, block, took), "workload": workload}
        for workload, own in seconds.items()
        for block in (0, 1)
        for policy, took in zip(policies, own, strict=True)
    ]
    found = sweep_figures.blocks(runs, policies)
    ratios = {
        (r["workload"], r["policy"], r["over"]): r for r in sweep_figures.compare(found, policies)
    }
    every = ratios[EVERY, "spindle", "none"]
    assert (every["ratio"], every["blocks"]) == (pytest.approx((2 * 32**0.5) ** 0.5, abs=1e-4), 2)
    assert every["interval_95"][0] < 4.0 < every["interval_95"][1]
    assert ratios["sql", "spindle", "none"]["interval_95"] is None
    assert ratios[EVERY, "spindle", BEST_FIXED]["ratio"] == pytest.approx(3.0)
    assert [row["ratio"] for row in sweep_figures.noise(found) if row["workload"] == EVERY] == [
        pytest.approx(2**0.5, abs=1e-4)
    ]
    assert [
        (claim["bar"], claim["over"])
        for claim in sweep_figures.claims(list(ratios.values()))
        if claim["workload"] == EVERY
    ] == [
        (0.98, "none"),
        (0.97, BEST_FIXED),
    ]


def test_of_all_loads_together_every_warm_block_of_any_is_a_pair():
    took = {"none": 4.0, "fixed-a-2": 3.0, "ema": 2.0, "spindle": 1.0, AGAIN: 4.0}
    runs = [
        run(policy, block, seconds, load)
        for load in ("closed-1", "closed-4")
        for block in (0, 1, 2)
        for policy, seconds in took.items()
    ]
    rows = {
        row["over"]: row
        for row in sweep_figures.overall(sweep_figures.blocks(runs, list(took)), list(took))
    }
    assert {over: (row["ratio"], row["blocks"]) for over, row in rows.items()} == {
        "ema": (2.0, 4),
        BEST_FIXED: (3.0, 4),
    }
    once = [made for made in runs if (made["load"], made["block"]) != ("closed-4", 2)]
    rows = {
        row["over"]: row
        for row in sweep_figures.overall(sweep_figures.blocks(once, list(took)), list(took))
    }
    assert {over: row["blocks"] for over, row in rows.items()} == {
        "ema": 3,
        BEST_FIXED: 2,
    }  # of one block none is best in the others


def test_speed_is_by_the_wall_in_a_closed_loop_and_by_latency_in_an_open_one():
    assert sweep_figures.speed({**run("none", 1, 2.0), "wall_s": 4.0}) == 2.5
    assert sweep_figures.speed({**run("none", 1, 2.0, "poisson-0.50"), "wall_s": 4.0}) == 5.0


def test_the_best_fixed_choice_of_a_block_is_chosen_on_the_other_blocks():
    speeds = {
        "spindle": [1.0, 1.0, 1.0],
        "fixed-a-1": [9.0, 1.0, 1.0],
        "fixed-a-2": [2.0, 3.0, 3.0],
    }
    assert sweep_figures.best_fixed(speeds) == [2.0, 1.0, 1.0]
    assert sweep_figures.best_fixed({"spindle": [1.0], "fixed-a-1": [1.0]}) == []


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [((1.5, 1.9), "holds"), ((1.4, 1.6), "open"), ((1.2, 1.49), "missed"), (None, "open")],
)
def test_a_claim_holds_only_where_its_interval_clears_the_bar(ends, verdict):
    row = {
        "workload": "mix",
        "load": "closed-1",
        "policy": "spindle",
        "over": "none",
        "ratio": 1.5,
        "interval_95": ends,
        "blocks": 8,
    }
    (claim,) = sweep_figures.claims([row])
    assert (claim["bar"], claim["verdict"]) == (1.5, verdict)


def test_bars_stand_where_a_claim_is_made():
    row = {"workload": "sql", "policy": "spindle", "ratio": 1.0, "interval_95": None, "blocks": 1}
    places = [
        ("closed-1", "none"),
        ("closed-4", "none"),
        ("closed-24", "none"),
        ("poisson-0.50", "none"),
        ("bursty-1.10", "none"),
    ]
    places += [
        ("closed-4", sweep_figures.BEST_FIXED),
        ("poisson-0.50", "ema"),
        ("closed-4", "fixed-a-1"),
    ]
    made = sweep_figures.claims([{**row, "load": load, "over": over} for load, over in places])
    assert [(claim["load"], claim["over"], claim["bar"]) for claim in made] == [
        ("closed-1", "none", 1.0),
        ("closed-24", "none", 0.98),
        ("bursty-1.10", "none", 0.98),
        ("closed-4", sweep_figures.BEST_FIXED, 0.97),
        ("poisson-0.50", "ema", 1.0),
    ]


def test_a_row_tells_of_the_warm_blocks_and_of_the_cold_one_apart():
    found = sweep_figures.blocks(
        [run("none", 0, 8.0), run("none", 1, 2.0), run("none", 2, 4.0)], ["none"]
    )
    (row,) = sweep_figures.summary(found, ["none", AGAIN])
    assert (row["mean_latency_s"], row["cold_mean_latency_s"], row["warm_blocks"]) == (3.0, 8.0, 2)
    assert row["step_time_share"] == {
        "planning": 0.1,
        "learning": 0.05,
        "verify": 0.6,
        "emit": 0.25,
    }
    assert (row["wasted_draft_tokens_per_token"], row["mean_batch"]) == (0.2, 1.5)
    assert row["predicted_over_measured_step_time"] == 0.75


def test_the_share_of_texts_that_are_those_of_plain_decoding_is_reported():
    plain, other = run("none", 1, 1.0), run("spindle", 1, 1.0)
    plain["replies"], other["replies"] = (
        [{**r["replies"][0], "text": text} for text in texts]
        for r, texts in ((plain, "ab"), (other, "ac"))
    )
    found = sweep_figures.blocks([plain, other], ["none", "spindle"])
    assert [
        row["same_text_as_none"] for row in sweep_figures.summary(found, ["none", "spindle"])
    ] == [1.0, 0.5]
