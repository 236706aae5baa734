"""Faults of acceptance, the token after it, and the draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backend.sampling import draw, verification
from backend.sampling.randomness import exponentials
from tests.contract import checks
from tests.contract.mutants.planting import Patch, change_verdicts, killed_by, wrap
from tests.contract.scenarios import BUSY, TAILED, greedily

# -- acceptance and the token after it


def tell_alike(verdict) -> None:
    """Have as many log-probabilities as tokens, so that it is the tokens that are noticed."""
    wanted = len(verdict.path) + 1
    verdict.log_probs = (verdict.log_probs * wanted)[:wanted] if verdict.log_probs else []


def children(request, node: int) -> list[int]:
    return [child for child, parent in enumerate(request.parents) if parent == node]


@killed_by(checks.texts, BUSY)
def accept_the_first_child_where_none_was_drawn(patch: Patch) -> None:
    def change(verdict, request, rows):
        verdict.path += children(request, verdict.path[-1] if verdict.path else -1)[:1]

    change_verdicts(patch, change)


@killed_by(checks.an_always_wrong_draft_gives_one_token_a_step)
def accept_everything(patch: Patch) -> None:
    def change(verdict, request, rows):
        verdict.path[:] = range(len(request.tokens))

    change_verdicts(patch, change)


@killed_by(checks.texts, BUSY)
def accept_a_sibling_of_the_token_drawn(patch: Patch) -> None:
    def change(verdict, request, rows):
        if verdict.path:
            verdict.path[-1] = children(request, request.parents[verdict.path[-1]])[0]

    change_verdicts(patch, change)


@killed_by(checks.texts, BUSY)
def accept_a_node_whose_parent_was_not_accepted(patch: Patch) -> None:
    """Any node with the token drawn will do."""

    def step(original, verdict, request):
        last = verdict.path[-1] if verdict.path else -1
        for node in range(last + 1, len(request.tokens)):
            if request.tokens[node] == verdict.column:
                verdict.path.append(node)
                return True
        return False

    wrap(patch, verification, "_step", step)


@killed_by(checks.counts, BUSY)
def never_accept_the_last_node(patch: Patch) -> None:
    """Costs time, never exactness: its token is the one drawn."""

    def step(original, verdict, request):
        found = original(verdict, request)
        if found and verdict.path[-1] == len(request.tokens) - 1:
            verdict.path.pop()
            return False
        return found

    wrap(patch, verification, "_step", step)


@killed_by(checks.texts, BUSY)
def look_at_the_first_child_only(patch: Patch) -> None:
    """Draws the same, but counts on the spine."""

    def step(original, verdict, request):
        found = original(verdict, request)
        if found and len(verdict.path) > 1 and verdict.path[-1] != verdict.path[-2] + 1:
            verdict.path[-1] = verdict.path[-2] + 1
        return found

    wrap(patch, verification, "_step", step)


def take_the_bonus_from(patch: Patch, shift: int) -> None:
    def change(verdict, request, rows):
        row = max(
            0, min(len(request.tokens), (verdict.path[-1] if verdict.path else -1) + 1 + shift)
        )
        verdict.column = int(rows[row].argmax())

    change_verdicts(patch, change)


@killed_by(checks.texts, greedily(BUSY))
def take_the_bonus_from_the_row_before(patch: Patch) -> None:
    take_the_bonus_from(patch, -1)


@killed_by(checks.texts, greedily(BUSY))
def take_the_bonus_from_the_row_after(patch: Patch) -> None:
    take_the_bonus_from(patch, 1)


@killed_by(checks.texts, BUSY)
def count_no_row_for_the_bonus(patch: Patch) -> None:
    """After the first request of a batch, rows are those of another."""

    def firsts(original, requests):
        return [max(place - index, 0) for index, place in enumerate(original(requests))]

    wrap(patch, verification, "_firsts", firsts)


# -- the draw


def change_words(patch: Patch, change: Callable) -> None:
    """Have ``change(word, seed, position)`` give the noise of a place."""
    wrap(patch, verification, "word", change)


@killed_by(checks.texts, BUSY)
def ignore_the_seed(patch: Patch) -> None:
    change_words(patch, lambda word, seed, position: word(0, position))


@killed_by(checks.texts, BUSY)
def draw_without_the_position(patch: Patch) -> None:
    change_words(patch, lambda word, seed, position: word(seed, 0))


@killed_by(checks.texts, BUSY)
def draw_for_the_place_before(patch: Patch) -> None:
    """With noise that has been used: a token would tell of the next."""
    change_words(patch, lambda word, seed, position: word(seed, position - 1))


@killed_by(checks.texts, BUSY)
def draw_a_run_with_the_noise_of_its_first_place(patch: Patch) -> None:
    def after(original, request, run):
        return replace(original(request, run), position=request.position)

    wrap(patch, verification.VerifyRequest, "after", after)


@killed_by(checks.texts, BUSY)
def give_every_token_the_same_noise(patch: Patch) -> None:
    def exponentials(original, words):
        return original(words & ~np.uint64(31))

    wrap(patch, draw, "exponentials", exponentials)


def change_times(patch: Patch, change: Callable) -> None:
    """Have ``change(times, tails, words)`` give the tails' exponentials of the target's race."""
    times_of = draw._times

    def race(original, heads, words, *others):
        def times(*arguments):
            times, tails, ends = times_of(*arguments)
            return times, change(times, tails, words), ends

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(draw, "_times", times)
            return original(heads, words, *others)

    wrap(patch, draw, "race", race)


@killed_by(checks.texts, TAILED)
def never_let_the_tail_win(patch: Patch) -> None:
    change_times(patch, lambda times, tails, words: np.full_like(tails, np.inf))


@killed_by(checks.texts, TAILED)
def let_the_tail_run_with_a_token_s_noise(patch: Patch) -> None:
    change_times(patch, lambda times, tails, words: exponentials(words))


@killed_by(checks.texts, TAILED)
def draw_from_the_tail_with_the_head_s_token(patch: Patch) -> None:
    wrap(patch, draw, "_in_tail", lambda original, probs, word, head, ids: head)


@killed_by(checks.texts, TAILED)
def race_for_a_head_that_depends_on_the_batch(patch: Patch) -> None:
    original = draw.Heads.of

    def of(distributions):
        rows = list(distributions)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(draw, "HEAD", 0.02 * len(rows))
            return original(rows)

    patch.setattr(draw.Heads, "of", of)


@killed_by(checks.proposals, BUSY)
def propose_with_noise_of_its_own(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def finishers(original, probs_of, words, *others):
        return original(probs_of, words + np.uint64(1), *others)

    wrap(patch, verification, "finishers", finishers)
