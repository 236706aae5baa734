"""BanditSpec (arXiv 2505.15141, ICML 2025): an upper confidence bound chooses the arm.

The paper's algorithm 4, UCBSpec, and its two experiments; ``generate_utils.py`` of
github.com/sail-sg/BanditSpec (read at a30f56d) has the second one alone. Its other algorithm,
EXP3Spec, was the slower one of both there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from bench.baselines.per_request import PerRequest
from policy.baselines import Baseline, same_for_all
from policy.latency import LatencyModel
from policy.plan import NO_DRAFT, FloatArray, Outcome, Plan, Policy, View


def confidence_radius(pulls: FloatArray, length: int) -> FloatArray:
    """Return how far the means of arms [..., K] may be off (equation 6), for rewards of 1 to
    ``length`` + 1 tokens, at the confidence delta of 1.
    """
    arms, steps = pulls.shape[-1], pulls.sum(-1, keepdims=True)
    surprise = 1 + 2 * np.log(arms * steps**2 * np.sqrt(1 + pulls))
    radius: FloatArray = length / 2 * np.sqrt((1 + pulls) / pulls**2 * surprise)
    return radius


class BanditDrafts(Policy[PerRequest]):
    """UCBSpec over drafts: each request tries every draft once, then trusts the highest bound.

    The reward is the tokens of a step, accepted and bonus; all drafts propose the same length. The
    confidence delta is not published; 1 makes for the shortest trials. A draft that can propose
    nothing is passed over, which helps.
    """

    def __init__(
        self, drafts: tuple[str, ...], latency: LatencyModel, k_max: int, *, length: int
    ) -> None:
        self.drafts, self.length = drafts, length

    def start(self) -> PerRequest:
        return PerRequest.none(2, len(self.drafts))

    def plan(self, view: View, state: PerRequest, now: float, rng: Rng) -> tuple[Plan, PerRequest]:
        pulls, tokens = state.of(view.request).swapaxes(0, 1)
        tried = np.maximum(pulls, 1)
        bound = tokens / tried + confidence_radius(tried, self.length)
        bound = np.where(pulls == 0, np.inf, bound)
        bound[view.ceiling == 0] = -np.inf
        return Plan.within(view, bound.argmax(1), self.length), state

    def observe(self, outcome: Outcome, state: PerRequest, now: float) -> PerRequest:
        rows = outcome.rows
        drafting = np.flatnonzero(rows.draft != NO_DRAFT)
        figures = state.of(rows.request)
        figures[drafting, 0, rows.draft[drafting]] += 1
        figures[drafting, 1, rows.draft[drafting]] += rows.emitted[drafting]
        return state.with_figures(rows.request, figures, outcome.finished)


class Arms(NamedTuple):
    """How often each length was used, and its mean tokens a second, [lengths] each."""

    steps: FloatArray
    tokens_per_s: FloatArray


class LengthsState(NamedTuple):
    """The lengths by range of batches, and the range and the length of the last step."""

    arms: Mapping[int, Arms]
    batches: int = 0
    length: int = 0


class BanditLengths(Policy[LengthsState]):
    """UCBSpec over lengths: one length for the batch, by the tokens a second that it brought.

    Two rounds over the lengths 0 to ``most``, then the one of the highest mean: as there, the same
    sqrt(6 log t / t) is added to every mean, so that it never tries again by itself. Each range of
    batch sizes (1, 2, 3 to 4, 5 to 8, ...) learns apart, which helps.
    """

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        k_max: int,
        *,
        draft: str,
        most: int = 4,
    ) -> None:
        self.draft, self.most = draft, most

    def start(self) -> LengthsState:
        return LengthsState({})

    def plan(
        self, view: View, state: LengthsState, now: float, rng: Rng
    ) -> tuple[Plan, LengthsState]:
        batches = max(len(view) - 1, 0).bit_length()
        arms = self._arms(state, batches)
        step, count = int(arms.steps.sum()), self.most + 1
        length = step % count if step < 2 * count else int(arms.tokens_per_s.argmax())
        after = LengthsState(state.arms, batches, length)
        return same_for_all(view, self.draft, length), after

    def observe(self, outcome: Outcome, state: LengthsState, now: float) -> LengthsState:
        if not len(outcome.rows) or outcome.times.measured_s <= 0:
            return state
        steps, mean = (column.copy() for column in self._arms(state, state.batches))
        reward = outcome.rows.emitted.sum() / outcome.times.measured_s
        steps[state.length] += 1
        mean[state.length] += (reward - mean[state.length]) / steps[state.length]
        return state._replace(arms={**state.arms, state.batches: Arms(steps, mean)})

    def _arms(self, state: LengthsState, batches: int) -> Arms:
        """Return what is known of the lengths in a range of batches."""
        return state.arms.get(batches) or Arms(*np.zeros((2, self.most + 1)))


ENTRIES = {
    "banditspec": Baseline.by_path(
        BanditDrafts,
        "BanditSpec over drafts",
        needs=("length",),
        colour="#a65628",
        marker=">",
    ),
    "banditspec-lengths": Baseline.by_path(
        BanditLengths,
        "BanditSpec over lengths",
        needs=("draft",),
        options={"most": (4, 8)},
        colour="#d2956b",
        marker="3",
    ),
}
