"""How often a second guess holds where the first was rejected: of one draft by rank (trees), and of another draft (merged chains).

Both are evidence that chains never give, hence an estimator of their own beside ``policy.acceptance``. Counts are kept by draft, not by
request: siblings are tested only where the spine was rejected, far too seldom to tell requests apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .plan import FloatArray, IntArray, Outcome, Rule

COUNTS = ("sibling_accepted", "sibling_tested", "rescue_accepted", "rescue_tested")


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Priors, in pseudo-observations of ``strength``, and the time in which evidence loses half its weight.

    ``sibling`` is the second rank's hazard, each further one's ``decay`` of it; ``rescue`` the share of another draft's hazard that is left
    where the first draft's token was rejected. All three are guesses on the low side: what is not known must not widen a tree by much.
    """

    sibling: float = 0.25
    decay: float = 0.6
    rescue: float = 0.5
    strength: float = 8.0
    half_life_s: float = 900.0


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """Counts. ``sibling_*`` float64[rules, drafts, K, W - 1] by depth and rank from the second on; ``rescue_*`` float64[rules, drafts,
    drafts] by the first and the second draft.
    """

    sibling_accepted: FloatArray
    sibling_tested: FloatArray
    rescue_accepted: FloatArray
    rescue_tested: FloatArray
    now: float = -math.inf


class RankModel:
    """The estimator: its methods return new states and leave the given one alone."""

    def __init__(self, drafts: int, k_max: int, width: int, config: RankConfig | None = None) -> None:
        self._drafts, self._k_max, self._ranks = drafts, k_max, max(width - 1, 0)
        self._config = config or RankConfig()
        self._prior = self._config.sibling * self._config.decay ** np.arange(self._ranks)

    def start(self) -> RankState:
        """Return the state before any evidence."""
        siblings = np.zeros((len(Rule), self._drafts, self._k_max, self._ranks))
        rescues = np.zeros((len(Rule), self._drafts, self._drafts))
        return RankState(siblings, siblings, rescues, rescues)

    def aged(self, state: RankState, now: float) -> RankState:
        """Return the state whose evidence has faded by the time passed: a width that was given up comes back."""
        passed_s = now - state.now
        if not 1.0 < passed_s < math.inf:
            return state if passed_s <= 1.0 else replace(state, now=now)
        keep = 0.5 ** (passed_s / self._config.half_life_s)
        return replace(state, now=now, **{name: getattr(state, name) * keep for name in COUNTS})

    def siblings(self, state: RankState, rule: IntArray) -> FloatArray:
        """Return the hazards of the ranks from the second on, float64[n, drafts, K, W - 1], for requests' rules int64[n].

        A depth is shrunk to its draft's level over all depths, that to the prior. Draws from one law are never accepted more often by a
        later rank (ADR 0011), so neither are estimates.
        """
        strength = self._config.strength
        level = (state.sibling_accepted.sum(2) + strength * self._prior) / (state.sibling_tested.sum(2) + strength)
        hazard = (state.sibling_accepted + strength * level[:, :, None]) / (state.sibling_tested + strength)
        ordered: FloatArray = np.minimum.accumulate(hazard, axis=3)[rule]
        return ordered

    def rescues(self, state: RankState, rule: IntArray, hazard: FloatArray) -> FloatArray:
        """Return the chance of a second draft's first token where the first draft's was rejected, float64[n, first, second].

        ``hazard`` float64[n, drafts] is that of a first token of each draft alone.
        """
        strength = self._config.strength
        prior = strength * self._config.rescue * hazard[:, None, :]
        chance: FloatArray = (state.rescue_accepted[rule] + prior) / (state.rescue_tested[rule] + strength)
        return chance

    def observe(self, state: RankState, outcome: Outcome, now: float) -> RankState:
        """Learn from a step's trees and merged chains, and from free drafts where a chain's first token was rejected."""
        state = self.aged(state, now)
        if self._ranks and outcome.shape is not None and outcome.shape.width is not None and outcome.rank is not None:
            state = self._trees(state, outcome, outcome.shape.width, outcome.rank)
        if self._drafts > 1:
            state = self._rescued(state, *_rescues(outcome))
        return state

    def _trees(self, state: RankState, outcome: Outcome, width: IntArray, rank: IntArray) -> RankState:
        """Count the siblings tested where the spine ended: all up to the accepted one, or all of that depth."""
        depth = outcome.accepted
        rows = np.flatnonzero(depth < np.minimum(outcome.scored, width.shape[1]))
        rows = rows[width[rows, depth[rows]] > 1]
        if not len(rows):
            return state
        accepted, tested = state.sibling_accepted.copy(), state.sibling_tested.copy()
        for row in rows.tolist():
            place = outcome.rule[row], outcome.draft[row], depth[row]
            last = int(rank[row] or width[row, depth[row]])
            tested[place][: last - 1] += 1.0
            if rank[row]:
                accepted[place][last - 2] += 1.0
        return replace(state, sibling_accepted=accepted, sibling_tested=tested)

    def _rescued(self, state: RankState, rule: IntArray, first: IntArray, second: IntArray, held: IntArray) -> RankState:
        if not len(rule):
            return state
        accepted, tested = state.rescue_accepted.copy(), state.rescue_tested.copy()
        np.add.at(tested, (rule, first, second), 1.0)
        np.add.at(accepted, (rule, first, second), held)
        return replace(state, rescue_accepted=accepted, rescue_tested=tested)

    def saved(self, state: RankState) -> dict[str, Any]:
        """Return the counts, JSON-able."""
        return {name: getattr(state, name).tolist() for name in COUNTS}


def _rescues(outcome: Outcome) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return (rule, first draft, second draft, whether its first token held) wherever a first chain's first token was rejected.

    A free draft that was only scored tells it as well as a merged chain, except of sampled requests, whose merged chain would be tested
    against the residual and not against the token that came of it.
    """
    missed = (outcome.length > 0) & (outcome.scored > 0) & (outcome.accepted == 0)
    found = []
    shape, held = outcome.shape, outcome.second_accepted
    if shape is not None and shape.second_draft is not None and shape.second_length is not None and held is not None:
        row = np.flatnonzero(missed & (shape.second_length > 0))
        found.append((outcome.rule[row], outcome.draft[row], shape.second_draft[row], held[row] > 0))
    if len(outcome.free_request) and missed.any():
        place = {r: row for row, r in enumerate(outcome.request.tolist()) if missed[row] and outcome.rule[row] != Rule.SAMPLED}
        at = np.array([place.get(r, -1) for r in outcome.free_request.tolist()])
        use = (at >= 0) & (outcome.free_scored > 0)
        row = at[use]
        found.append((outcome.rule[row], outcome.draft[row], outcome.free_draft[use], outcome.free_accepted[use] > 0))
    if not found:
        return (np.zeros(0, np.int64),) * 4
    rule, first, second, hit = (np.concatenate(column).astype(np.int64) for column in zip(*found, strict=True))
    return rule, first, second, hit
