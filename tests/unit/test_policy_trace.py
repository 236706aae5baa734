import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from policy import NO_DRAFT, DraftNodes, FreeChains, Plan, StepNodes
from policy.replay import (
    SCHEMA,
    TracedPlanner,
    TraceError,
    decode,
    encode,
    explain,
    replay,
    same,
)
from policy.wrappers import WrapperState
from tests.fakes.outcomes import outcome_of
from tests.fakes.policies import RNG, certain, latency, planner, view

ROOT = Path(__file__).resolve().parents[2]


def traced(steps=60, most_lines=1000, **config):
    """The lines of a planner's trace over some steps of a batch that changes, with an arm of a
    canary, a stand-by and free scores.
    """
    lines, rng = [], np.random.default_rng(1)
    policy, draws = (
        TracedPlanner(planner(**{"explore_share": 0.05, **config}), lines.append, most_lines),
        np.random.default_rng(5),
    )
    state = policy.start()
    for step in range(steps):
        rows = int(rng.integers(1, 6))
        seen = view(
            rows,
            request=np.arange(rows) + step // 10,
            catchup=rng.integers(0, 9, (rows, 2)),
            context=rng.integers(9, 99, rows),
            evidence=rng.integers(0, 12, (rows, 2)) if step % 5 else None,
        )
        if step % 7 == 3:
            given = Plan(np.zeros(rows, np.int64), np.full(rows, 2))
            seen = replace(
                seen, control=rng.random(rows) < 0.5, control_plan=given, prefill_tokens=5
            )
        if step % 11 != 5:
            plan, state = policy.plan(seen, state, 0.3 * step, draws)
            accepted, nodes = rng.integers(0, plan.length + 1), StepNodes()
            if config.get("whole_batch"):
                row = np.arange(rows).repeat(plan.length)
                none = np.zeros(len(row), np.bool_)
                nodes = StepNodes(row, rng.random(len(row)), none, none)
            outcome = outcome_of(
                *(seen.request, plan.draft, plan.length, accepted, accepted + 1),
                *(plan.length, plan.length, float(rng.random())),
                parts_s={"verify": float(rng.random())},
                free=FreeChains(seen.request[:1], *np.array([[1], [1], [2], [step % 12]])),
                nodes=nodes,
                view=seen,
                plan=plan,
                finished=seen.request[:1] if step % 10 == 9 else np.zeros(0, np.int64),
            )
            if seen.evidence is not None:
                outcome.rows.evidence = seen.evidence[np.arange(rows), plan.draft]
            state = policy.observe(outcome, state, 0.3 * step + 0.1)
    return lines


def test_a_trace_replays_to_the_same_plans_bit_for_bit():
    plans = list(replay(traced()))
    assert len(plans) > 50
    assert all(same(step.recorded, step.plan) for step in plans)
    assert any(step.recorded.length.any() for step in plans)


def test_a_trace_over_a_restored_state_replays_bit_for_bit():
    """A server warms up before it restores what was saved."""
    lines, steps = [], 20
    policy = TracedPlanner(planner(), lines.append, 1000)
    state = policy.start()
    for step in range(2 * steps):
        if step == steps:
            saved = policy.save(state, float(step))
            state = policy.load(json.loads(json.dumps(saved)), float(step), 9000.0)
        seen = view(3, request=np.arange(3) + step // 10)
        plan, state = policy.plan(seen, state, float(step), RNG)
        done = seen.request, plan.draft, plan.length, plan.length, plan.length + 1
        outcome = outcome_of(*done, plan.length, plan.length, 1.5, {"verify": 1.5}, view=seen)
        state = policy.observe(outcome, state, step + 0.5)
    assert len(lines) == 1 + 2 * 2 * steps + 1
    plans = list(replay(lines))
    assert len(plans) == 2 * steps
    assert all(same(step.recorded, step.plan) for step in plans)


def test_a_trace_of_trials_replays_bit_for_bit():
    plans = list(replay(traced(explore_share=0.3)))
    assert all(same(step.recorded, step.plan) for step in plans)
    assert any(step.plan.notes.get("trial") for step in plans)


def test_a_trace_of_plans_for_the_whole_batch_replays_bit_for_bit():
    plans = list(replay(traced(whole_batch=True)))
    assert all(same(step.recorded, step.plan) for step in plans)
    assert any(step.plan.nodes for step in plans)
    assert plans[-1].state.supply.evidence_nodes.any()


def test_a_changed_outcome_is_noticed():
    lines = traced()
    row = next(i for i, line in enumerate(lines) if '"observe"' in line)
    event = json.loads(lines[row])
    event["observe"]["outcome"]["times"]["measured_s"] *= 2
    event["observe"]["outcome"]["times"]["parts_s"]["verify"] *= 2
    lines[row] = json.dumps(event)
    assert not all(same(step.recorded, step.plan) for step in replay(lines))


def test_a_trace_is_bounded_and_what_there_is_of_it_replays():
    lines = traced(most_lines=30)
    assert len(lines) == 30
    assert all(same(step.recorded, step.plan) for step in replay(lines))


def test_what_is_encoded_comes_back_the_same():
    seen = view(3, cap_s=np.inf, control_plan=Plan(np.full(3, NO_DRAFT), np.zeros(3, np.int64)))
    back = decode(json.loads(json.dumps(encode(seen))))
    shown = replace(seen, evidence=np.array([[3, 0], [0, 1], [2, 11]]))
    assert decode(encode(shown)).evidence.tolist() == shown.evidence.tolist()
    of_before = encode(shown)
    del of_before["evidence"]
    assert decode(of_before).evidence is None
    assert encode(back) == encode(seen)
    assert (back.ceiling.dtype, back.drafts) == (np.int64, seen.drafts)
    assert back.ceiling.shape == (3, 2)


@pytest.mark.parametrize("line", ["no json", "{}", '{"planner": {"schema": 99}}', "[1]"])
def test_what_is_no_trace_is_refused_with_its_line(line):
    with pytest.raises(TraceError, match="line 1"):
        list(replay([line]))
    with pytest.raises(TraceError, match="line 3"):
        list(replay([*traced(steps=1)[:2], line]))


def test_a_trace_of_before_is_refused_by_its_schema():
    first, *_ = traced(steps=1)
    with pytest.raises(TraceError, match=f"schema must be {SCHEMA}, got {SCHEMA - 1}"):
        list(replay([first.replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA - 1}')]))


def test_what_is_verified_is_the_planner_s_word():
    drafted = DraftNodes(*np.zeros((4, 0)))
    inner = SimpleNamespace(trim=lambda view, plan, given, _: plan.length - (given is drafted))
    plan = Plan(np.zeros(2, np.int64), np.array([2, 3]))
    nodes = TracedPlanner(inner, print, 9).trim(view(2), plan, drafted, WrapperState(None))
    assert nodes.tolist() == [1, 2]


@pytest.mark.medium
def test_the_command_counts_the_plans_and_shows_the_first_that_differs(tmp_path):
    lines, path = traced(steps=10), tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    done = run(path)
    assert done.returncode == 0
    first, rows, steps, *_, hint = done.stdout.splitlines()
    assert first == "9 plans, all the same"  # one of the ten steps another planned
    assert rows.startswith("rows ")
    assert "small" in rows
    assert steps.startswith("steps 9: ")
    assert hint.startswith("--step N, 0 to 8, ")
    head, *requests = run(path, "--step", "3").stdout.splitlines()
    assert " prompt tokens; " in head
    assert all(line.startswith("request ") for line in requests)
    assert requests
    assert run(path, "--step", "9").returncode == 2
    path.write_text("\n".join(line.replace('"predicted_s":', '"predicted_s":1') for line in lines))
    assert run(path).returncode == 1
    path.write_text("nothing")
    assert run(path).returncode == 2


def run(path, *options):
    command = [sys.executable, "-m", "policy.replay", str(path), *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


# -- explanations


def explained(made, seen, state=None):
    state = state or made.start()
    plan, _ = made.plan(seen, state, 0.0, RNG)
    return plan, explain(made, seen, state, plan, 0.0)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_every_request_gets_its_line(rows):
    made = planner(**certain(0.8))
    seen = view(rows)
    plan, lines = explained(made, seen)
    for row, line in enumerate(lines):
        name, length = seen.drafts[plan.draft[row]], plan.length[row]
        assert line.startswith(f"request {row}: {name} x {length}: +")
        assert "tokens/s; next best" in line


def test_what_the_draft_showed_is_said():
    made = planner(**certain(0.8))
    for shown, says in (([0, 7], ":"), ([3, 7], " (evidence 3):")):
        plan, (line,) = explained(made, view(1, evidence=np.array([shown])))
        assert plan.draft.tolist() == [0]
        assert line.startswith(f"request 0: small x {plan.length[0]}{says} +")


def test_the_reasons_for_no_speculation_are_distinguished():
    made = planner(**certain(0.8))
    seen = view(3, ceiling=np.array([[8, 8], [0, 0], [8, 8]]))
    _, lines = explained(
        made, replace(seen, control=np.array([False, False, True]), control_plan=Plan.nothing(3))
    )
    assert "next best" in lines[0]
    assert lines[1].endswith("none: no draft can propose anything")
    assert lines[2].endswith("its choice is given, not planned")
    dear = planner(latency((0.9, 0.95), token_s=0.3, free_tokens=1), **certain(0.2))
    _, (line,) = explained(dear, view(1))
    assert "none: at best" in line


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ({"cap_s": 1.35}, "; longer: the cap on the step's time"),
        ({"ceiling": np.full((1, 2), 2)}, "; its ceiling"),
    ],
)
def test_what_keeps_a_chain_short_is_named(bound, why):
    plan, (line,) = explained(planner(**certain(0.9)), view(1, **bound))
    assert plan.length[0] < 8
    assert line.endswith(why)


def test_a_row_that_no_draft_can_serve_says_so():
    _, lines = explained(planner(**certain(0.9)), view(2, ceiling=np.zeros((2, 2), np.int64)))
    assert all(line.endswith("none: no draft can propose anything") for line in lines)
