"""Decisions never depend on what the step has yet to draw: not on its proposals, not on what the target will accept of them.

A planner that peeks is caught in three ways: by what its view and state can reach, by plans that change with the future alone, and by
the law of the emitted tokens. Each way is shown to catch one that tries, and the honest planner, through the real loop, engines and
verification, passes all of them.
"""

import inspect
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest

from backend.engines import verification
from backend.ports import Turn
from backend.randomness import Purpose, uniforms
from policy import NO_DRAFT, AdaptivePlanner, LatencyModel, Outcome, Plan, PlannerConfig, Policy, Rule, View
from policy.shaped import ShapedPlanner
from policy.shapes import Shapes
from tests.contract.checks import LAW_DRAFTS, LAW_PROMPT, LAW_VOCAB, WIDE, chi_square, law_engine, marginal
from tests.contract.deployment import K_MAX, Deployment
from tests.contract.reference import Reference

TOKENS = 4
CHANGED_FROM = len(LAW_PROMPT) + 2


class Timeless(Policy):
    """A planner on a clock of its own: what a machine measures would make two runs differ by itself. Keeps views, states and plans."""

    def __init__(self, planner):
        self.planner, self.seen = planner, []

    def start(self):
        return self.planner.start()

    def plan(self, view, state, now, rng):
        plan, after = self.planner.plan(view, state, now, rng)
        self.seen.append((view, state, plan))
        return plan, after

    def observe(self, outcome, state, now):
        return self.planner.observe(replace(outcome, measured_s=1.0, parts_s={}), state, now)

    def drift(self, state):
        return self.planner.drift(state)


class Peeking(Policy):
    """Gets hold of the loop. ``proposals``: speculates only where the draft is going to propose one of some tokens, which it finds
    out by running it; ``verdicts``: only where the number that decides about the first proposed token is going to be small.
    """

    def __init__(self, what):
        self.what, self.deployment = what, None

    def start(self):
        return None

    def plan(self, view, state, now, rng):
        look = self._proposals if self.what == "proposals" else self._verdicts
        good = np.array(look(view), np.bool_) if len(view) else np.zeros(0, np.bool_)
        length = np.where(good, np.minimum(2, view.ceiling[:, 0]), 0)
        return Plan(np.where(length > 0, 0, NO_DRAFT), length), state

    def observe(self, outcome, state, now):
        return state

    def drift(self, state):
        return {}

    def _sequences(self, view):
        sequences = {session.id: session.sequence for session in self.deployment.live}
        return [sequences[request] for request in view.request.tolist()]

    def _proposals(self, view):
        draft, sequences = self.deployment.drafts[0], self._sequences(view)
        able = [s for s, room in zip(sequences, view.ceiling[:, 0].tolist(), strict=True) if room]
        draft.submit([Turn(s, len(s.tokens), run=1, keep_probs=True) for s in able])
        liked = {done.sequence_id: done.tokens[0] < LAW_VOCAB // 2 for done in draft.poll(1.0)} if able else {}
        return [liked.get(s.id, False) for s in sequences]

    def _verdicts(self, view):
        keys = [(s.sampling.seed, len(s.tokens), s.attempt) for s in self._sequences(view)]
        seeds, positions, attempts = zip(*keys, strict=True)
        return uniforms(seeds, positions, Purpose.ACCEPT, attempts) < 0.5


def honest():
    """A planner for which drafting is cheap, so that it speculates, and probes."""
    return AdaptivePlanner(("other",), LatencyModel.unit(1, draft_s=0.02), PlannerConfig(k_max=K_MAX, explore_share=0.05))


def run(planner, rounds):
    policy = Timeless(planner)
    deployment = Deployment(law_engine(), [LAW_DRAFTS["other"]()], policy, chunk_tokens=200, max_active=64)
    planner.deployment = deployment
    sessions = [deployment.submit(LAW_PROMPT, TOKENS, replace(WIDE, seed=seed)) for seed in range(rounds)]
    deployment.run(rounds)
    return policy, sessions


# -- what can be reached


def leaves(value, path, seen):
    """Every value that a view or a state leads to, with its path."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if is_dataclass(value):
        for item in fields(value):
            yield from leaves(getattr(value, item.name), f"{path}.{item.name}", seen)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]", seen)
    elif isinstance(value, (tuple, list)):
        for place, item in enumerate(value):
            yield from leaves(item, f"{path}[{place}]", seen)
    else:
        yield path, value


def unfit(value):
    """Whether a leaf is anything but plain numbers: whatever can be called, or leads on to an engine or a text."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "ifb" or not isinstance(value.base, (np.ndarray, type(None)))
    return not isinstance(value, (int, float, str, Rule, type(None)))


def reachable(policy):
    return [
        (path, value)
        for view, state, _ in policy.seen
        for part, name in ((view, "view"), (state, "state"))
        for path, value in leaves(part, name, set())
    ]


def test_nothing_but_numbers_can_be_reached_from_a_view_and_a_state():
    policy, _ = run(honest(), 40)
    found = reachable(policy)
    assert len(found) > 200
    assert not [path for path, value in found if unfit(value)]


def test_no_array_of_a_view_or_a_state_holds_the_step_s_tokens():
    """Tokens of this vocabulary are 0 to 4: nothing that a planner sees may be the next tokens of the requests, row by row."""
    policy, sessions = run(honest(), 64)
    texts = {session.id: session.sequence.tokens for session in sessions}
    for view, _, _ in policy.seen:
        if len(view) < 8:
            continue
        coming = [texts[r][c] if c < len(texts[r]) else -1 for r, c in zip(view.request.tolist(), view.context.tolist(), strict=True)]
        for path, value in leaves(view, "view", set()):
            if isinstance(value, np.ndarray) and len(value) == len(coming):
                assert all(column.tolist() != coming for column in value.reshape(len(coming), -1).T), path


def test_a_view_with_a_sequence_or_an_engine_in_it_is_noticed():
    policy, sessions = run(honest(), 8)
    view, state, _ = policy.seen[0]
    assert not any(unfit(value) for _, value in leaves(view, "view", set()))
    for contraband in (sessions[0].sequence.sampling.seed.bit_length, lambda: None, run, b"text", object()):
        assert any(unfit(value) for _, value in leaves({"view": view, "more": contraband}, "view", set()))
    assert not inspect.ismethod(state.acceptance.now)


# -- another future


def _numbers_to_come(*keys):
    """The numbers that verification is going to use."""
    return verification.uniforms(*keys)


def other_future(original, seeds, positions, *keys):
    """The same numbers up to a position, others from there on."""
    numbers = original(seeds, positions, *keys)
    return np.where(np.asarray(positions) < CHANGED_FROM, numbers, 1 - np.nextafter(1.0, 0) * numbers)


def plans_in_two_futures(make):
    """By future the plans up to the step whose view first holds a token that is not the same in both, and what the requests emit."""
    original, found = verification.uniforms, []
    first, sessions = run(make(), 64)
    found.append((first, [s.sequence.tokens for s in sessions]))
    with patch.object(verification, "uniforms", lambda *keys: other_future(original, *keys)):
        second, sessions = run(make(), 64)
    found.append((second, [s.sequence.tokens for s in sessions]))
    shared = 0
    for (one, *_), (other, *_) in zip(first.seen, second.seen, strict=False):
        if max([0, *one.context.tolist(), *other.context.tolist()]) > CHANGED_FROM:
            break
        shared += 1
    return found, shared


def differing(found, shared):
    (first, _), (second, _) = found
    pairs = [(one[2], other[2]) for one, other in zip(first.seen[:shared], second.seen[:shared], strict=True)]
    return sum(not (np.array_equal(a.length, b.length) and np.array_equal(a.draft, b.draft)) for a, b in pairs)


def shaped():
    shapes = Shapes(tree_width=1, cohorts=2, contention=1.0)
    return ShapedPlanner(("other",), LatencyModel.unit(1, draft_s=0.02), PlannerConfig(k_max=K_MAX), shapes)


@pytest.mark.parametrize("make", [honest, shaped])
def test_the_same_history_before_another_future_gets_the_same_plans(make):
    found, shared = plans_in_two_futures(make)
    assert shared >= 2
    assert found[0][1] != found[1][1]
    assert any(plan.length.any() for _, _, plan in found[0][0].seen[:shared])
    assert differing(found, shared) == 0


def test_a_planner_that_looks_at_the_numbers_to_come_has_other_plans_in_another_future():
    with patch(f"{__name__}.uniforms", _numbers_to_come):
        found, shared = plans_in_two_futures(lambda: Peeking("verdicts"))
    later = [(a[2], b[2]) for a, b in zip(found[0][0].seen, found[1][0].seen, strict=False)][: shared + 1]
    assert any(not np.array_equal(a.length, b.length) for a, b in later)


# -- the law


@pytest.fixture(scope="module")
def law():
    return Reference(law_engine()).joint(LAW_PROMPT, WIDE, 3)


def surprise(planner, law, rounds):
    """Chi-square of the first three tokens jointly over the bound that the target's law passes once in a million, and proposed tokens."""
    policy, sessions = run(planner, rounds)
    texts = Counter(tuple(session.sequence.tokens[len(LAW_PROMPT) :][:3]) for session in sessions)
    worst = 0.0
    for length in (1, 2, 3):
        statistic, bound = chi_square(marginal(texts, length), marginal(law, length))
        worst = max(worst, statistic / bound)
    return worst, sum(int(plan.length.sum()) for _, _, plan in policy.seen)


@pytest.mark.slow
@pytest.mark.parametrize("make", [honest, shaped])
def test_the_honest_planner_leaves_the_target_s_law(law, make):
    worst, proposed = surprise(make(), law, 1500)
    assert proposed > 1000
    assert worst < 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["proposals", "verdicts"])
def test_a_planner_that_peeks_shifts_the_law_and_is_caught(law, what):
    worst, proposed = surprise(Peeking(what), law, 1500)
    assert proposed > 300
    assert worst > 1


def test_a_view_and_an_outcome_have_no_place_for_tokens():
    """Counts, ids and times only: whoever adds a field of token ids has to argue with this list."""
    known = "drafts request context remaining ceiling catchup weight rule group ready prefill_tokens queued prefilling"
    limits = "control given flying cap_s limit headroom"  # ``flying`` holds plans that were made before
    assert {item.name for item in fields(View)} == {*known.split(), *limits.split()}
    assert not [item.name for item in fields(Outcome) if item.name in ("tokens", "proposal", "text")]
