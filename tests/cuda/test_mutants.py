"""Faults of a step on the device; the texts must show each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backend.engines.cuda import plain, step, trees
from tests.cuda.test_step import test_text_is_that_of_plain_decoding as texts_are_exact

pytestmark = pytest.mark.slow
Patch = Callable[[pytest.MonkeyPatch], None]


def moves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plain, "move", lambda *_: None)


def accepts_the_first_sibling(patch: pytest.MonkeyPatch) -> None:
    walk = plain.walk

    def wrong(drawn: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor, places: int) -> None:
        seen = drawn.clone()
        seen[0] = ids[min(1, len(ids) - 1)]
        walk(seen, ids, *rest, places=places)

    patch.setattr(plain, "walk", wrong)


def commits_one_place_too_many(patch: pytest.MonkeyPatch) -> None:
    run = step.VerifyStep.run

    def wrong(self: step.VerifyStep, *, bounded: bool) -> None:
        run(self, bounded=bounded)
        self.slots.length[self.slot] += (self.count > 2).long()

    patch.setattr(step.VerifyStep, "run", wrong)


def keeps_the_last_token_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    run = step.VerifyStep.run

    def wrong(self: step.VerifyStep, *, bounded: bool) -> None:
        last = self.slots.last.clone()
        run(self, bounded=bounded)
        self.slots.last.copy_(torch.where(self.slots.last % 7 == 0, last, self.slots.last))

    patch.setattr(step.VerifyStep, "run", wrong)


def gives_siblings_the_depth_of_children(patch: pytest.MonkeyPatch) -> None:
    pack = plain.pack

    def wrong(*columns: torch.Tensor, page: int, scratch: int) -> None:
        pack(*columns, page=page, scratch=scratch)
        position, place = columns[8], columns[10]
        position[place != scratch] = position[place != scratch].sort().values

    patch.setattr(plain, "pack", wrong)


def lets_nodes_see_their_siblings(patch: pytest.MonkeyPatch) -> None:
    words = plain.ancestor_words
    patch.setattr(
        plain, "ancestor_words", lambda parents: [(2 << n) - 1 for n in range(len(words(parents)))]
    )


def chooses_children_without_their_parents(patch: pytest.MonkeyPatch) -> None:
    choose = trees.choose

    def wrong(chance: torch.Tensor, budget: int, room: torch.Tensor | None = None) -> torch.Tensor:
        return choose(torch.where(chance > 0.0, 1.1 - chance, 0.0), budget, room)

    patch.setattr(trees, "choose", wrong)


MUTANTS: list[Patch] = [
    moves_nothing,
    accepts_the_first_sibling,
    commits_one_place_too_many,
    keeps_the_last_token_of_the_step_before,
    gives_siblings_the_depth_of_children,
    lets_nodes_see_their_siblings,
    chooses_children_without_their_parents,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_is_noticed(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        texts_are_exact(1.2)
