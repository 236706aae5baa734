"""The guard: what is measured to be slower ends, what pays again comes back, for little."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from policy import DraftNodes, FixedLength, NoSpeculation, Plan, Policy, SwitchedPolicy, Switches
from policy.guard import Guard
from policy.levels import LEVELS, NONE, rows_of
from tests.fakes.policies import RNG, outcome, view

DRAFTS = ("small", "large")


class World:
    """A server that runs a policy: a step takes a second, and longer for each proposed token; some
    proposed tokens are accepted.
    """

    change_tokens = 0

    def __init__(self, policy, rows=8, seed=0, noise=0.05, ahead=False):
        self.policy, self.rows, self.noise, self.ahead = policy, rows, noise, ahead
        self.rng, self.state = np.random.default_rng(seed), policy.start()
        self.prefill_tokens = self.pass_tokens = 0
        self.steps, self.pending = [], []
        self.set()

    def set(self, token_s=0.1, accepted=0.5, draft_s=(0.0, 0.0)):
        """Set a token's seconds and the share of tokens accepted, each row in a way of its own."""
        self.token_s, self.accepted, self.draft_s = token_s, accepted, draft_s

    def run(self, steps):
        """Take steps; return the notes of their plans."""
        return [self.step().notes for _ in range(steps)]

    def step(self):
        request = np.arange(self.rows)
        seen = view(
            self.rows,
            DRAFTS,
            request=request,
            prefill_tokens=self.prefill_tokens,
            pass_tokens=self.pass_tokens,
            change_tokens=self.change_tokens,
        )
        plan, self.state = self.policy.plan(seen, self.state, 0.0, RNG)
        accepted = self.rng.binomial(plan.length, self.accepted)
        seconds = self.seconds(plan) * math.exp(self.noise * self.rng.standard_normal())
        done = outcome(seen, plan, accepted, seconds, prefill_tokens=self.prefill_tokens)
        self.steps.append((plan, seconds, int(done.rows.emitted.sum())))
        self.pending.append(done)
        if len(self.pending) > self.ahead:
            self.learn()
        return plan

    def seconds(self, plan):
        """Return how long a step takes without noise."""
        draft_s = sum(self.draft_s[d] for d in set(plan.draft.tolist()) if d >= 0)
        return 1 + self.token_s * plan.length.max(initial=0) + draft_s

    def learn(self):
        done = self.pending.pop(0)
        self.state = self.policy.observe(done, self.state, 0.0)

    @property
    def level(self):
        buckets = self.state.outer.buckets
        return LEVELS[buckets[(self.rows - 1).bit_length()].level] if buckets else "planned"

    @property
    def other(self):
        return self.state.outer.buckets[(self.rows - 1).bit_length()].other


GOOD, BAD = {"token_s": 0.15, "accepted": 0.5}, {"token_s": 0.35, "accepted": 0.2}


def guard(length=4):
    return Guard(FixedLength("small", length))


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 100])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_loses_ends_and_what_pays_again_comes_back(rows, ahead):
    world = World(guard(), rows, ahead=ahead)
    world.set(**GOOD)
    world.run(600)
    assert world.level == "planned"
    world.set(**BAD)
    world.run(3000)
    assert world.level == "none"
    world.set(**GOOD)
    world.run(6000)
    assert world.level == "planned"


def test_ends_within_hundreds_of_steps_from_the_start():
    world = World(guard())
    world.set(token_s=0.25, accepted=0.15)
    world.run(400)
    assert world.level == "none"


@pytest.mark.parametrize("ahead", [False, True])
def test_pairs_tell_the_true_ratio(ahead):
    world = World(guard(), 32, noise=0.0, ahead=ahead)
    world.set(token_s=0.3, accepted=0.5)
    world.run(8000)
    true = math.log((1 + 4 * 0.5) / 2.2)
    assert world.other.mean == pytest.approx(-true, abs=0.02)
    (verdict,) = world.policy.verdicts(world.state)
    assert (verdict.rows, verdict.level) == ("17-32", "planned")
    assert verdict.ratio == pytest.approx(math.exp(true), rel=0.02)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_gain_of_some_percent_is_never_taken_for_a_loss(rows):
    for seed in range(5):
        world = World(guard(3), rows, seed, noise=0.1)
        world.set(token_s=0.15, accepted=0.18)  # 1.54 tokens in 1.45 s
        world.run(3000)
        assert world.level == "planned"


@pytest.mark.parametrize(("token_s", "most"), [(0.05, 0.0035), (0.3, 0.004)])
def test_experiments_cost_half_a_percent_at_most(token_s, most):
    world = World(guard(), 8)
    world.set(token_s=token_s, accepted=0.5)
    world.run(6000)
    gain = 3 / (1 + 4 * token_s)
    assert world.level == "planned"
    lost_s = sum(
        (1 - 1 / gain) * seconds
        for plan, seconds, _ in world.steps
        if plan.notes.get("experiment") == "none"
    )
    assert 0 < lost_s < most * sum(seconds for _, seconds, _ in world.steps)


class Padding(World):
    """A pass of another width than the last one takes longer, and so do some that are padded after
    it. Every few steps have a prompt.
    """

    width, padded, steps_between_prompts = 0, 0, 10**9

    def step(self):
        self.prefill_tokens = 200 if len(self.steps) % self.steps_between_prompts == 0 else 0
        return super().step()

    def seconds(self, plan):
        width = int(plan.length.sum()) + self.prefill_tokens
        self.padded = 4 if width != self.width and not self.prefill_tokens else self.padded - 1
        changes, self.width = width != self.width, width
        return super().seconds(plan) + 0.4 * changes + 0.05 * (self.padded > 0)


@pytest.mark.parametrize(
    ("kind", "times"), [(World, BAD), (Padding, {"token_s": 0.25, "accepted": 0.2})]
)
def test_trying_what_lost_costs_half_a_percent_with_the_steps_after_it(kind, times):
    world = kind(guard(), noise=0.02)
    world.set(**times)
    world.run(1500)
    del world.steps[:]
    notes = world.run(6000)
    assert world.level == "none"
    assert any("experiment" in note for note in notes)
    seconds, tokens = (sum(step[part] for step in world.steps) for part in (1, 2))
    assert tokens / seconds > 0.993 * 8  # with the credit at the start


def test_steps_after_prompts_are_not_compared_with_others():
    world = Padding(guard(), 64, noise=0.0)
    world.steps_between_prompts = 6
    world.set(token_s=0.25, accepted=0.2)
    world.run(6000)
    assert world.level == "none"
    usual_s = 1 + 0.05 * 3 / 4  # three of four steps are padded
    true = math.log(1.8 / (2 + 0.05) * usual_s)
    assert world.other.mean == pytest.approx(true, abs=0.04)


def test_a_plain_step_counts_once_the_engine_does_not_pad_it_any_more():
    class Wide(World):
        """Three plain steps are padded to the width before, and take as long as that."""

        narrower = 0

        def seconds(self, plan):
            width = self.rows + int(plan.length.sum())
            self.narrower = self.narrower + 1 if width < self.pass_tokens else 0
            if 0 < self.narrower <= 3:
                width = self.pass_tokens
            self.pass_tokens = width
            return width / self.rows

    world = Wide(guard(), 64, noise=0.0)
    world.set(accepted=0.6)  # 3.4 tokens in the time of five
    world.run(1000)
    assert world.level == "none"
    assert world.other.mean == pytest.approx(math.log(3.4 / 5), abs=0.05)


@pytest.mark.parametrize("worst", [-0.7, -0.1])
def test_no_evidence_is_final(worst):
    policy = guard(4)
    world = World(policy)
    world.set(**GOOD, draft_s=(0.0, 3.0))
    world.run(50)
    bucket = world.state.outer.buckets[3]
    other = bucket.other
    for _ in range(300):
        other = other.learnt(worst)
    world.state.outer.buckets = {3: bucket._replace(level=NONE, other=other, windows={})}
    world.run(12000)
    assert world.level == "planned"


def test_loads_are_judged_apart():
    world = World(guard(), 2)
    world.set(**GOOD)
    for _ in range(100):
        world.rows = 2
        world.set(**GOOD)
        world.run(10)
        world.rows = 16
        world.set(**BAD)
        world.run(12)
    found = {v.rows: v.level for v in world.policy.verdicts(world.state)}
    assert found == {"2": "planned", "9-16": "none"}


def test_buckets_have_the_names_of_their_rows():
    assert [rows_of(place) for place in range(6)] == ["1", "2", "3-4", "5-8", "9-16", "17-32"]


@pytest.mark.parametrize("change", ["prefill", "rows", "load"])
def test_a_prompt_or_another_row_ends_an_experiment_that_drafts(change):
    world = World(guard())
    world.set(**BAD)
    world.run(1000)
    assert world.level == "none"
    world.set(**GOOD)
    while world.step().notes.get("experiment") != "planned":
        pass
    samples = world.state.outer.samples
    world.prefill_tokens = 5 if change == "prefill" else 0
    world.rows = {"rows": 7, "load": 4}.get(change, 8)
    assert "experiment" not in world.step().notes
    assert world.state.outer.samples == samples


def test_an_experiment_without_speculation_goes_on_through_prompts_and_other_rows():
    world = World(guard())
    while "experiment" not in world.step().notes:
        pass
    world.set(token_s=0.1, accepted=0.5)
    rest = []
    for step in range(2, 30):
        world.prefill_tokens, world.rows = 5 * (step % 6 == 0), 7 if step % 6 == 3 else 8
        rest.append(world.step().notes.get("experiment"))
    assert rest[:19] == ["none"] * 19  # 8 settle; of the others each third counts
    assert rest[19:] == [None] * 9
    assert world.state.outer.samples == 1
    world.rows = 3
    assert "experiment" not in world.step().notes


def test_steps_with_prompts_are_no_evidence():
    world = World(guard())
    world.prefill_tokens = 100
    assert world.run(500) == [{}] * 500


def test_a_pause_is_no_property_of_a_level():
    def pausing(seed):
        world = World(guard(3), 8, seed)
        world.set(token_s=0.15, accepted=0.25)
        for _ in range(600):
            world.run(9)
            world.noise, noise = 3.0, world.noise
            world.run(1)
            world.noise = noise
        return world.level

    assert [pausing(seed) for seed in range(6)].count("planned") >= 5


class Aftermath(World):
    """Steps after one that drafted take longer, the first of them most."""

    since = 0

    def seconds(self, plan):
        self.since = 0 if plan.length.any() else self.since + 1
        return super().seconds(plan) + 0.7 * (self.since > 0) * 0.75**self.since


class Sometimes(Policy):
    """Speculates in one of some steps."""

    steps = 0

    def plan(self, seen, state, now, rng):
        self.steps += 1
        return Plan.within(seen, 0, 0 if self.steps % 5 else 4), None


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("policy", "token_s", "accepted"),
    [(FixedLength("small", 4), 0.1, 0.05), (Sometimes(), 0.05, 0.2)],
)
def test_what_drafting_costs_the_steps_after_it_is_its_cost(rows, policy, token_s, accepted):
    world = Aftermath(policy, rows)
    world.set(token_s, accepted)
    world.run(1000)
    _, seconds, tokens = zip(*world.steps, strict=True)
    true = math.log(sum(tokens) / sum(seconds) / rows)
    assert -0.25 < true < -0.1
    world = Aftermath(Guard(policy), rows)
    world.set(token_s, accepted)
    world.run(1500)
    assert world.level == "none"
    assert world.other.mean < 0


def test_a_step_in_which_prompts_end_and_nothing_decodes_is_no_evidence():
    policy, empty, ended = guard(), view(0, DRAFTS), view(1, DRAFTS)
    _, state = policy.plan(empty, policy.start(), 0.0, RNG)
    done = outcome(ended, Plan.nothing(1), 0, view=empty)
    assert not policy.observe(done, state, 0.0).outer.buckets


def test_a_policy_that_never_speculates_is_left_alone():
    world = World(Guard(NoSpeculation()))
    assert world.run(500) == [{}] * 500


def test_in_an_experiment_nothing_of_the_policy_is_asked_but_it_learns():
    class Watched(FixedLength):
        def observe(self, outcome, state, now):
            return (state or 0) + 1

        def trim(self, seen, plan, drafted, state):
            return np.ones(len(seen), np.int64)

    world = World(Guard(Watched("small", 3)))
    nodes = DraftNodes(*np.zeros((4, 0)))
    for _ in range(400):
        before = world.state.inner
        plan = world.step()
        trimmed = world.policy.trim(view(8), plan, nodes, world.state).tolist()
        if "experiment" in plan.notes:
            assert world.state.inner == (before or 0) + 1
            assert trimmed == plan.length.tolist() == [0] * 8
        else:
            assert trimmed == [1] * 8


def test_drafts_are_not_asked_where_the_next_step_is_plain():
    world = World(guard())
    assert world.policy.needs_ceilings(np.arange(8), world.state)
    world.set(**BAD)
    world.run(1500)
    assert world.level == "none"
    needed = []
    for _ in range(1000):
        needs = world.policy.needs_ceilings(np.arange(8), world.state)
        assert needs or not world.step().length.any()
        needed.append(needs)
        if needs:
            world.step()
    assert 0 < sum(needed) < 200


def test_states_are_never_changed_in_place():
    world = World(guard(4))
    world.set(**BAD)
    kept = []
    for _ in range(600):
        world.step()
        kept.append((world.state, pickle.dumps(world.state)))
    assert all(pickle.dumps(state) == as_it_was for state, as_it_was in kept)


# -- under the operators' switches


@pytest.mark.parametrize("mode", ["off", "shadow"])
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_that_another_planned_are_no_evidence(mode, ahead):
    switches = Switches(speculation=mode, fixed_draft="large", fixed_length=2)
    world = World(SwitchedPolicy(guard(), lambda: switches), ahead=ahead)
    world.set(**BAD)
    world.run(300)
    own = world.state.inner.outer
    assert own.samples == 0
    assert not own.buckets


def test_in_a_canary_the_rows_of_the_control_keep_their_choice_in_every_step():
    switches = Switches(canary_share=0.5, fixed_draft="large", fixed_length=2)
    policy = SwitchedPolicy(guard(), lambda: switches)
    state, control, modes = policy.start(), np.arange(8) % 2 == 0, set()
    for _ in range(1500):
        seen = view(8, DRAFTS, request=np.arange(8), control=control)
        plan, state = policy.plan(seen, state, 0.0, RNG)
        assert plan.length[control].tolist() == [2] * 4
        modes.add(tuple(plan.length[~control].tolist()))
        seconds = 1 + 0.5 * float(plan.length.max())
        state = policy.observe(outcome(seen, plan, 1, seconds), state, 0.0)
    assert {(4,) * 4, (0,) * 4} <= modes
    assert policy.policy.verdicts(state.inner)[0].level == "none"


# -- over a restart


def learnt():
    world = World(guard())
    world.set(**BAD)
    world.run(1500)
    assert world.level == "none"
    return world


def test_levels_survive_a_restart_and_old_evidence_weighs_less():
    world = learnt()
    data = json.loads(json.dumps(world.policy.save(world.state, 0.0)))
    soon, late = (world.policy.load(data, 9.0, idle_s) for idle_s in (0.0, 7200.0))
    for state in (soon, late):
        assert world.policy.verdicts(state)[0].level == "none"
    before = world.other
    assert soon.outer.buckets[3].other == before
    assert late.outer.buckets[3].other.weight == pytest.approx(before.weight / 4)
    world.state = soon
    world.set(**GOOD)
    world.run(6000)
    assert world.level == "planned"


def test_nothing_saved_is_nothing_known():
    policy = guard()
    assert policy.save(policy.start(), 0.0) == {}
    assert policy.load({}, 0.0, 0.0).outer.buckets == {}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((), 3, "guard must be"),
        (("schema",), 0, "guard.schema must be 2, got 0"),
        (("rows",), [], "guard.rows must be"),
        (("rows", "3-5"), {}, "guard.rows must have ranges such as 9-16, got '3-5'"),
        (("rows", "5-8"), 1, "guard.rows.5-8 must be"),
        (("rows", "5-8", "level"), "short", "guard.rows.5-8.level must be one of"),
        (("rows", "5-8", "other"), None, "guard.rows.5-8.other must be"),
        (("rows", "5-8", "other"), [1], "guard.rows.5-8.other must be"),
    ],
)
def test_saved_data_that_do_not_fit_are_refused_by_name(path, value, words):
    world = learnt()
    data = json.loads(json.dumps(world.policy.save(world.state, 0.0)))
    place = data
    for key in ("guard", *path)[:-1]:
        place = place[key]
    place[("guard", *path)[-1]] = value
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        world.policy.load(data, 0.0, 0.0)


def test_a_plan_keeps_the_notes_of_its_policy():
    class Noting(FixedLength):
        def plan(self, seen, state, now, rng):
            plan, state = super().plan(seen, state, now, rng)
            return replace(plan, notes={"gain": 1.5}), state

    world = World(Guard(Noting("small", 1)))
    world.set(**BAD)
    notes = world.run(3000)
    assert notes[0] == {"gain": 1.5}
    assert {"gain": 1.5, "guard": "none", "experiment": "planned"} in notes
    assert {"guard": "planned", "experiment": "none"} in notes
