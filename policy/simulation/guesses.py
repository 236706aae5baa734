"""The truth about second guesses: what of a tree's siblings or of a second chain is accepted where the first guess was rejected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policy.plan import FloatArray, IntArray, Plan, TurnShape, View
from policy.trees import rank_chances

from .workload import Acceptance, uniform

_SIBLING, _RESCUE = 8, 9  # purposes of random numbers


@dataclass(frozen=True, slots=True)
class Guesses:
    """``sibling`` is the second rank's hazard, each further one's ``decay`` of it; ``rescue`` the share of a draft's own hazard that is
    left where another's first token was rejected. The same for all requests; random numbers by position, so that all arms share them.
    """

    sibling: float = 0.0
    decay: float = 0.6
    rescue: float = 0.0

    def ranks(self, seed: int, request: IntArray, position: IntArray, width: IntArray) -> IntArray:
        """Return the sibling accepted at output positions among ``width[n]`` ranks where the first was rejected: from 2 on, 0 for none."""
        hazard = self.sibling * self.decay ** np.arange(int(width.max(initial=1)) - 1)
        drawn = uniform(seed, _SIBLING, request, position)
        rank = 2 + (drawn[:, None] >= np.cumsum(rank_chances(hazard))).sum(1)
        accepted: IntArray = np.where(rank <= width, rank, 0)
        return accepted

    def rescued(
        self, seed: int, acceptance: Acceptance, request: IntArray, position: IntArray, draft: IntArray, length: IntArray, now: float
    ) -> IntArray:
        """Return how many tokens of second chains are accepted where the first chains' first tokens were rejected, int64[n]."""
        first: FloatArray = acceptance.first_hazard(request, now)[np.arange(len(request)), draft]
        held = uniform(seed, _RESCUE, request, position) < self.rescue * first
        rest = acceptance.accepted(request, position + 1, draft, np.maximum(length - 1, 0), now)
        accepted: IntArray = np.where(held & (length > 0), 1 + rest, 0)
        return accepted


def second_guesses(
    guesses: Guesses, seed: int, acceptance: Acceptance, view: View, plan: Plan, position: IntArray, accepted: IntArray, now: float
) -> tuple[IntArray, IntArray]:
    """Return (rank of the sibling accepted where the spine ended, accepted tokens of the second chain), int64[n] each."""
    none, shape = np.zeros(len(view), np.int64), plan.shape
    if shape is None:
        return none, none
    ended = np.flatnonzero(accepted < plan.length)
    rank, second = none.copy(), none.copy()
    if shape.width is not None and len(ended):
        width = shape.width[ended, accepted[ended]]
        rank[ended] = guesses.ranks(seed, view.request[ended], (position + accepted)[ended], width)
    if shape.second_draft is not None and shape.second_length is not None:
        row = ended[(accepted[ended] == 0) & (shape.second_length[ended] > 0)]
        if len(row):
            draft, length = shape.second_draft[row], shape.second_length[row]
            second[row] = guesses.rescued(seed, acceptance, view.request[row], position[row], draft, length, now)
    return rank, second


def with_newcomers(shape: TurnShape | None, newcomers: int) -> TurnShape | None:
    """Return a shape with rows for requests that have just ended their prompts, for an ``Outcome``."""
    if shape is None:
        return None

    def longer(rows: IntArray | None, value: int) -> IntArray | None:
        if rows is None:
            return None
        whole: IntArray = np.concatenate([rows, np.full((newcomers, *rows.shape[1:]), value)])
        return whole

    columns = {"width": 0, "second_draft": -1, "second_length": 0, "cohort": -1}
    return TurnShape(**{name: longer(getattr(shape, name), value) for name, value in columns.items()}, piece_tokens=shape.piece_tokens)
