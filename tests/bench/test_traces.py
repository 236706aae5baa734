"""The benchmark over traces, on a tiny one that is made up here."""

import gzip
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from bench.pictures import THEMES
from bench.traces import arms
from bench.traces.__main__ import main
from bench.traces.arms import TraceArm, TraceLoad
from bench.traces.costs import AUTHORS, CHAIN, Costs
from bench.traces.figures import cell, order, summary, table
from bench.traces.pictures import picture
from bench.traces.reading import TraceFileError, files, traces
from bench.traces.replay import MEASURED, ReplayOptions, made_up, run
from bench.traces.world import DEEPEST, World
from policy import AdaptivePlanner, Outcome, PlannerConfig
from policy.baselines import FixedLength, NoSpeculation
from policy.evidence import bin_of_match
from policy.latency import LatencyError, LatencyTable
from policy.plan import Plan, Policy

COSTS = Costs.authors()
HEAD = ReplayOptions(drafts=("eagle",))


def request(rng, size, repeats):
    """Return a request whose text repeats itself where ``repeats``, and what a head makes of it."""
    period = rng.integers(0, 50, 7).tolist()
    text = [period[i % 7] if repeats else int(rng.integers(1000)) for i in range(size)]
    emitted = [1, *rng.integers(1, 7, size - 1).tolist()]
    return rng.integers(1000, 2000, 30).tolist(), text, emitted


def line(prompt, text, emitted, *, public=False):
    data = {"prompt_token_ids": prompt, "generated_token_ids": text}
    return json.dumps(
        data | ({"acc_eagle": {"acc_len": emitted}} if public else {"eagle": emitted})
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A set in each dialect: code that repeats itself, chat that does not."""
    made, rng = tmp_path_factory.mktemp("traces"), np.random.default_rng(0)
    code = [line(*request(rng, 60, repeats=True)) for _ in range(8)]
    with gzip.open(made / "code.jsonl.gz", "wt") as file:
        file.write("\n".join(code) + "\n")
    chat = [line(*request(rng, 80, repeats=False), public=True) for _ in range(8)]
    (made / "combined_chat.jsonl").write_text("\n".join(chat) + "\n")
    return made


@pytest.fixture(scope="module")
def world(folder):
    return World.read(folder)


def test_both_dialects_are_read(folder, world):
    assert [*files(folder)] == ["chat", "code"] == list(world.sets)
    assert world.of.tolist() == [0] * 8 + [1] * 8
    assert world.size.tolist() == [80] * 8 + [60] * 8
    assert (world.prompt == 30).all()
    first = next(traces(folder / "combined_chat.jsonl"))
    assert world.eagle[:80].tolist() == [emitted - 1 for emitted in first.emitted]


def test_an_answer_is_cut_at_1024_tokens_and_a_short_one_left_out(tmp_path):
    rng = np.random.default_rng(1)
    lines = [line(*request(rng, size, repeats=False)) for size in (1500, 20, 21)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    assert World.read(tmp_path).size.tolist() == [1024, 21]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", r"line 2: must be an object, got '\[1\]'"),
        ('{"prompt_token_ids": [1]}', "line 2: lacks the field 'generated_token_ids'"),
        (line([1], [2], [3]).replace("eagle", "other"), "line 2: lacks the field 'eagle'"),
        (line([1], ["x"], [3]), r"line 2: generated_token_ids\[0\] must be an integer >= 0"),
        (line([1], [2], [True]), r"line 2: eagle\[0\] must be an integer >= 1, got True"),
        (line([1], [2], [0], public=True), r"line 2: acc_eagle.acc_len\[0\] must be an integer"),
        (line([1], [2], 3), "line 2: eagle must be a list, got 3"),
        (line([1], [2], [3]).replace("[3]", '[1], "acc_eagle": 7'), None),
        (line([1], [2], 3, public=True).replace('{"acc_len": 3}', "7"), "acc_eagle must be an obj"),
    ],
)
def test_a_bad_line_is_an_error_with_file_line_and_field(tmp_path, text, error):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{line([1], [2], [3])}\n{text}\n")
    if error is None:
        assert len([*traces(path)]) == 2
        return
    with pytest.raises(TraceFileError, match=error) as raised:
        [*traces(path)]
    assert str(path) in str(raised.value)


def test_a_folder_without_usable_traces_is_an_error(tmp_path):
    with pytest.raises(TraceFileError, match=r"no file SET\.jsonl"):
        World.read(tmp_path)
    (tmp_path / "a.jsonl").write_text(line([1], [2], [3]))
    with pytest.raises(
        TraceFileError, match="set 'a' needs 2 requests of at least 21 tokens, got 0"
    ):
        World.read(tmp_path)
    (tmp_path / "combined_a.jsonl").write_text("")
    with pytest.raises(TraceFileError, match=r"a\.jsonl and combined_a\.jsonl are of the same set"):
        World.read(tmp_path)
    (tmp_path / "combined_a.jsonl").unlink()
    (tmp_path / "a.jsonl").rename(tmp_path / "a.jsonl.gz")
    with pytest.raises(TraceFileError, match=r"a\.jsonl\.gz: "):
        World.read(tmp_path)


def test_the_look_up_finds_what_repeats_itself(world):
    chat, code = (world.at[np.flatnonzero(world.of == n)] for n in (0, 1))
    assert (world.suffix[code[0] + 9 : code[0] + 40] == DEEPEST).all()
    assert world.suffix[code[0] + 59] == 1  # the text ends
    assert world.evidence[code[0] + 9] == bin_of_match(2, agree=True)
    assert world.evidence[code[0] + 27] == bin_of_match(20, agree=True)
    assert not world.evidence[code[0] : code[0] + 9].any()
    assert not world.suffix[chat[0] : chat[0] + 80].any()


def test_what_look_ups_find_is_kept(folder, tmp_path, world, monkeypatch):
    World.read(folder, tmp_path / "kept")
    monkeypatch.setattr("bench.traces.world._columns", None)
    kept = World.read(folder, tmp_path / "kept")
    assert kept.sets == world.sets
    assert (kept.claims == world.claims).all()


def test_halves_share_no_request_and_have_all_sets(world):
    halves = world.halves(seed=7)
    assert sorted(np.concatenate(halves)) == list(range(16))
    assert [np.bincount(world.of[half]).tolist() for half in halves] == [[4, 4], [4, 4]]
    assert {int(n) for n in world.of[world.halves(("code",))[0]]} == {1}


def test_settings_are_tuned_on_the_half_that_is_not_scored(world, monkeypatch):
    tuning, scored = [], []

    def tuned(load, claims, wanted):
        tuning.append({int(n) for n in load.order})
        return {arms.FIXED_EAGLE: TraceArm(FixedLength("eagle", 1), HEAD)}

    def record(load, arm):
        scored.append({int(n) for n in load.order})
        return run(world, load.order, load.in_flight, arm.policy, COSTS, arm.options)

    monkeypatch.setattr("bench.traces.figures.tune", tuned)
    monkeypatch.setattr(TraceLoad, "run", record)
    cell(world, COSTS, "mixed", 2, arms=["none"])
    assert len(tuning) == 2
    first, second = scored[:2], scored[2:]
    for half, other in zip((first, second), tuning, strict=True):
        assert all(not requests & other and len(requests) == 8 for requests in half)


def test_a_run_has_at_least_three_requests_for_every_slot(world):
    half = world.halves()[0]
    assert len(order(world, half, 1, tokens=100)) == 4  # two, twice
    assert len(order(world, half, 32)) >= 96


def test_every_token_of_a_request_is_emitted_once(world):
    requests = np.arange(16)
    for arm in (TraceArm(NoSpeculation(), HEAD), TraceArm(FixedLength("suffix", 5)), planner()):
        ran = run(world, requests, 1, arm.policy, COSTS, arm.options)
        assert sum(ran.tokens) == int((world.size - 1).sum())


def planner(**options):
    made = AdaptivePlanner(("eagle", "suffix"), COSTS.model(), PlannerConfig(k_max=16))
    return TraceArm(made, ReplayOptions(**options))


def test_the_speed_of_a_fixed_length_is_that_by_hand(world):
    a, seconds, tokens, length = AUTHORS, 0.0, 0, 3
    for request in (0, 1):
        position, seen, prompt = 1, 1, int(world.prompt[request])
        while position < world.size[request]:
            accepted = min(int(world.eagle[world.at[request] + position]), length)
            context, unread = prompt + position, position - seen
            emitted = min(accepted + 1, int(world.size[request]) - position)
            seconds += a["pass_s"] + a["token_s"] * (1 + length) + a["kv_s"] * context + a["step_s"]
            read = max(unread, 1) + length - 1
            chain_s = a["head_s"] + a["head_kv_s"] * context
            seconds += length / CHAIN * chain_s + a["head_token_s"] * read
            seen, position = position + min(accepted, length - 1), position + emitted
            tokens += emitted
    ran = run(world, np.array([0, 1]), 1, FixedLength("eagle", length), COSTS, HEAD)
    assert sum(ran.tokens) == tokens
    assert ran.speed == pytest.approx(tokens / seconds, rel=1e-12)


def test_the_look_up_is_charged_in_every_step_used_or_not(world):
    both = ReplayOptions(drafts=("eagle", "suffix"))
    plain, charged = (
        run(world, np.arange(4), 2, NoSpeculation(), COSTS, options) for options in (HEAD, both)
    )
    unused = run(world, np.arange(4), 2, NoSpeculation(), COSTS, ReplayOptions(looks=None))
    assert unused.seconds == plain.seconds
    used = [
        run(
            world, np.arange(8, 12), 2, FixedLength("suffix", 3), COSTS, ReplayOptions(looks=looks)
        ).seconds
        for looks in (True, None)
    ]
    assert used[0] == used[1]
    step_s = AUTHORS["step_s"]
    share = [
        (after - step_s) / (before - step_s)
        for before, after in zip(plain.seconds, charged.seconds, strict=True)
    ]
    assert share == pytest.approx([1 + AUTHORS["lookup_share"]] * len(share))


def test_no_arm_is_faster_than_the_oracle(world):
    load = TraceLoad(world, np.tile(np.arange(16), 2), 4, COSTS)
    bound = {
        name: load.run(arm).speed
        for name, arm in arms.untuned_arms(COSTS, {}).items()
        if name.startswith("oracle")
    }
    others = [TraceArm(FixedLength("eagle", k), HEAD) for k in (1, 2, 3, 5)]
    assert bound["oracle-eagle"] > max(load.run(arm).speed for arm in others)
    others += [planner(), arms.of_others(COSTS, 4, {})["suffix-else-eagle"].best(load)]
    assert bound["oracle"] > max(load.run(arm).speed for arm in others)


class Watcher(Policy):
    """Plans that alternate between the drafts, trimmed to two nodes; it keeps what it observes."""

    def __init__(self):
        self.seen = []

    def plan(self, view, state, now, rng):
        draft = (np.arange(len(view)) + len(self.seen)) % 2
        self.view = view
        return Plan.within(view, draft, 4), state

    def trim(self, view, plan, drafted, state):
        assert (np.bincount(drafted.row, minlength=len(view)) == plan.length).all()
        return np.minimum(plan.length, 2)

    def observe(self, outcome: Outcome, state, now):
        self.seen.append((self.view, outcome))


def test_outcomes_say_what_a_server_would(world):
    policy = Watcher()
    run(world, np.arange(16), 3, policy, COSTS, ReplayOptions(evidence=True))
    for view, outcome in policy.seen:
        rows, free, nodes = outcome.rows, outcome.free, outcome.nodes
        assert (rows.verified <= np.minimum(rows.length, 2)).all()
        assert (rows.followed == np.minimum(rows.accepted, rows.verified)).all()
        assert (rows.scored == np.minimum(rows.emitted, rows.length)).all()
        assert (rows.emitted <= rows.followed + 1).all()
        assert ((rows.draft >= 0) == (rows.length > 0)).all()
        chosen = np.where(rows.draft >= 0, view.evidence[np.arange(3), rows.draft], 0)
        assert (rows.evidence == chosen).all()
        unused = (rows.draft != 1) & (view.ceiling[:, 1] > 0)
        assert free.request.tolist() == view.request[unused].tolist()
        assert (free.evidence == view.evidence[unused, 1]).all()
        assert (free.scored == np.minimum(view.ceiling[unused, 1], rows.emitted[unused])).all()
        for row in range(3):
            own = nodes.row == row
            known = min(int(rows.length[row]), int(rows.verified[row]) + 1)
            if rows.accepted[row] == rows.emitted[row]:  # the text ended in an accepted token
                known = min(known, int(rows.emitted[row]))
            assert own.sum() == known
            accepted = nodes.accepted[own]
            assert accepted.sum() == min(rows.accepted[row], known)
            assert (np.diff(accepted.astype(int)) <= 0).all()
        assert outcome.times.measured_s == pytest.approx(
            sum(outcome.times.parts_s.values())
            - outcome.times.parts_s["planning"]
            - outcome.times.parts_s["learning"]
        )
    assert any(outcome.finished.size for _, outcome in policy.seen)


def test_planning_is_charged_at_its_time_and_learning_in_the_next_step(world, monkeypatch):
    monkeypatch.setattr("bench.traces.replay.thread_time", itertools.count().__next__)
    repeats = np.arange(8, 16)  # where every step has a draft to trim
    free, paid, fixed = (
        run(world, repeats, 1, Watcher(), COSTS, ReplayOptions(planning=planning, begin=20))
        for planning in (0.0, MEASURED, 1.0)
    )
    more = np.array(paid.seconds) - free.seconds
    assert more[0] == pytest.approx(2)
    steps = np.array([sum(used) > 0 for used in paid.drafting[1:]])
    assert more[1:][steps] == pytest.approx(3)
    assert paid.planning_s[0] == 3
    assert np.array(fixed.seconds) - free.seconds == pytest.approx(1)


def test_a_head_goes_on_while_it_is_confident(world):
    claims = np.tile(0.8 ** np.arange(1, 9), (len(world.eagle), 1))
    for least, depth in ((0.9, 1), (0.7, 2), (0.3, 6), (0.01, 8)):
        going_on = replace(HEAD, head_claims=claims, least_confidence=least)
        found = run(world, np.arange(9), 3, FixedLength("eagle", 4), COSTS, going_on)
        assert (
            found.tokens
            == run(world, np.arange(9), 3, FixedLength("eagle", depth), COSTS, HEAD).tokens
        )


def test_a_made_up_confidence_ranks_by_its_quality(world):
    def pairs_ranked(quality):
        first = made_up(world, quality)[:, 0]
        right, wrong = first[world.eagle > 0], first[world.eagle == 0]
        return float((right[:, None] > wrong).mean())

    assert np.ptp(made_up(world, 0.0)[:, 0]) == pytest.approx(0)
    assert pairs_ranked(0.7) == pytest.approx(0.84, abs=0.03)
    assert pairs_ranked(1.2) > pairs_ranked(0.7)
    paths = made_up(world, 3.0)
    assert (np.diff(paths, axis=1) <= 0).all()
    # it is as sure of tokens after one that is not accepted, and half of those would have been
    after = (paths[:, 1] / paths[:, 0])[world.eagle == 0]
    assert 0.3 < (after > 0.5).mean() < 0.9


def test_what_an_arm_needs_is_tuned_jointly_and_then_each_option(world):
    load, asked = TraceLoad(world, np.arange(8, 16), 2, COSTS), []

    def make(settings):
        asked.append(settings)
        policy = FixedLength(settings["draft"], settings["length"])
        return TraceArm(policy, ReplayOptions(planning=settings["late"]), settings)

    needs = {"draft": ("eagle", "suffix"), "length": (2, 16)}
    best = arms.Tunable(make, needs, {"late": (0.0, 1.0)}).best(load)
    assert best.settings == {"draft": "suffix", "length": 16, "late": 0.0}
    assert len(asked) == 1 + 4 + 2


def test_every_policy_of_the_registry_has_an_arm_that_runs(world):
    load = TraceLoad(world, np.arange(4), 2, COSTS)
    found = arms.of_others(COSTS, 2, {})
    assert {"smartspec", "spin", "schedule"} <= set(found)
    for name, tunable in found.items():
        assert sum(load.run(tunable.first()).tokens) > 0, name


def test_the_command_writes_table_record_and_picture(folder, tmp_path, capsys):
    out = tmp_path / "made" / "traces.json"
    asked = ["--data", str(folder), "--out", str(out), "--quick", "--in-flight", "2"]
    assert main([*asked, "--sets", "mixed", "code"]) == 0
    record = json.loads(out.read_text())
    rows = {(row["data"], row["in_flight"], row["arm"]): row for row in record["summary"]}
    assert {key[:2] for key in rows} == {("mixed", 2), ("code", 2)}
    assert {"none", "fixed-eagle", "rule", "planner"} <= {key[2] for key in rows}
    none, planner = rows["mixed", 2, "none"], rows["mixed", 2, "planner"]
    assert none["over_none"] == 1
    assert len(planner["over_none_by_half"]) == 2
    assert planner["over_none"] == pytest.approx(np.mean(planner["over_none_by_half"]))
    assert record["costs"]["kv_s"] == AUTHORS["kv_s"]
    assert {"seed", "command", "commit", "machine"} <= set(record)
    assert "mixed, over fixed-eagle" in capsys.readouterr().out
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (["--arms", "best"], "--arms must be of none, "),
        (["--arms", "planer"], "did you mean 'planner'"),
        (["--arms", "bench.baselines.spin.SpinSelectio"], "did you mean 'SpinSelection'"),
        (["--sets", "poems"], "--sets must be of mixed, chat, code, got 'poems'"),
        (["--costs", "missing.json"], "missing.json: "),
    ],
)
def test_what_cannot_be_run_is_an_error(folder, tmp_path, capsys, asked, error):
    assert main(["--data", str(folder), "--out", str(tmp_path / "o.json"), *asked]) == 2
    assert error in capsys.readouterr().err


def test_measured_tables_replace_the_authors_fit(tmp_path):
    target = LatencyTable.synthetic("target", {1: 0.02, 64: 0.03}).to_dict()
    head = LatencyTable.synthetic("eagle", {1: 0.002, 64: 0.002}).to_dict()
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"target": target, "eagle": head, "step_s": 0.001}))
    costs = Costs.measured(path)
    assert costs.model().target.seconds(64) == pytest.approx(0.03)
    assert costs.model(("eagle",)).drafts[0].seconds(1) == pytest.approx(0.002)
    path.write_text(json.dumps({"target": target, "step_s": 0.001}))
    with pytest.raises(LatencyError, match=r"costs\.json: lacks the field 'eagle'"):
        Costs.measured(path)
    path.write_text(json.dumps({"target": target, "eagle": head, "step_s": -1}))
    with pytest.raises(LatencyError, match="step_s must be a finite number >= 0, got -1"):
        Costs.measured(path)


def test_what_arms_scored_is_kept_but_for_planners(world, tmp_path, monkeypatch):
    asked = {"arms": ["rule", "planner-free"], "tokens": 100, "cache": tmp_path}
    first = cell(world, COSTS, "mixed", 1, **asked)
    ran, real = [], TraceLoad.run

    def record(load, arm):
        ran.append(type(arm.policy))
        return real(load, arm)

    monkeypatch.setattr(TraceLoad, "run", record)
    assert cell(world, COSTS, "mixed", 1, **asked)["arms"]["rule"] == first["arms"]["rule"]
    assert ran == [AdaptivePlanner] * 2
    cell(world, COSTS, "mixed", 2, **asked)
    assert FixedLength in ran[2:]


def test_the_summary_compares_half_by_half():
    speeds = {"none": [100.0, 50.0], "fixed-eagle": [200.0, 75.0], "planner": [220.0, 90.0]}
    speeds["rule"] = [200.0, 100.0]
    found = {
        "data": "mixed",
        "in_flight": 8,
        "arms": {name: {"tokens_per_s": own} for name, own in speeds.items()},
    }
    rows = summary([found])
    assert rows[2]["over_none_by_half"] == [2.2, 1.8]
    assert rows[2]["over_none"] == pytest.approx(2.0)
    assert rows[2]["over_fixed_eagle"] == pytest.approx((1.1 + 1.2) / 2)
    assert "+10.0% +20.0%" in table(rows)
    assert table(rows).splitlines()[-1].split() == ["planner", "/", "rule", "1.100", "0.900"]
    figure = picture(rows, THEMES["dark"])
    assert [axis.get_title() for axis in figure.axes] == ["mixed"]
