"""HedgeSpec (arXiv 2510.20064v2, ICLR 2026, "Not-a-Bandit"): a draft for each request, by hedging.

A verified text shows how long a proposal each draft would have had accepted there, so that every
draft is judged and none is tried for its own sake. The paper's full text was not at hand: its
abstract and a public reading of its algorithm and theorems were, no code was found. They describe
this: for each request NormalHedge (Chaudhuri, Freund, Hsu, "A parameter-free hedging algorithm",
2009) over the drafts, with the loss 1 - (expected accepted tokens + 1) / (K + 1), which becomes
known late. It counts accepted tokens alone; neither time nor load.

There every draft reads every verified token to be judged; here a draft is judged by what a step
reports of it, which takes no time of its own: that helps. A draft that can propose nothing is not
drawn, which helps, too.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator as Rng

from bench.baselines.per_request import PerRequest
from policy.baselines import Baseline
from policy.latency import LatencyModel
from policy.plan import NO_DRAFT, BoolArray, FloatArray, IntArray, Outcome, Plan, Policy, View

_REGRET, _RUN, _LOSS, _SEEN, _WEIGHT = range(5)
"""Figures of a request by draft: regret; accepted tokens of a proposal that has not ended yet;
sum and number of losses; weight.
"""
_BISECTIONS = 12


def normal_hedge(regret: FloatArray) -> FloatArray:
    """Return NormalHedge's weights [r, d] from regrets: x / c exp(x^2 / 2c) of the positive x, c
    such that the mean of exp(x^2 / 2c) is e. Without a positive one they are 0.
    """
    positive = np.maximum(regret, 0.0)
    square = positive**2 / 2
    most = square.max(1, initial=0.0, keepdims=True)
    high = np.where(most > 0, most, 1.0)
    low = high / (1 + np.log(max(regret.shape[1], 1)))
    for _ in range(_BISECTIONS):
        scale = (low + high) / 2
        above = np.exp(square / scale).mean(1, keepdims=True) > np.e
        low, high = np.where(above, scale, low), np.where(above, high, scale)
    weights: FloatArray = positive * np.exp(square / high)
    return weights


class HedgeSpec(Policy[PerRequest]):
    """Each request draws its draft in every step by NormalHedge's weights; all propose one length.

    A proposal that was right in all that is known of it goes on in the next step's, until it is
    wrong or ``length`` tokens long; then it is a loss. If a step reports nothing of a draft, its
    mean loss stands for it; a draft never judged is drawn first.
    """

    def __init__(
        self, drafts: tuple[str, ...], latency: LatencyModel, k_max: int, *, length: int
    ) -> None:
        self.drafts, self.length = drafts, length

    def start(self) -> PerRequest:
        return PerRequest.none(5, len(self.drafts))

    def plan(self, view: View, state: PerRequest, now: float, rng: Rng) -> tuple[Plan, PerRequest]:
        able = view.ceiling > 0
        figures = state.of(view.request)
        weight = np.where(able, figures[:, _WEIGHT], 0.0)
        weight = np.where(weight.sum(1, keepdims=True) > 0, weight, able)
        unjudged = able & (figures[:, _SEEN] == 0)
        weight = np.where(unjudged.any(1, keepdims=True), unjudged, weight)
        below = weight.cumsum(1)
        threshold = rng.random((len(view), 1)) * below[:, -1:]
        draft = np.minimum((below <= threshold).sum(1), len(self.drafts) - 1)
        return Plan.within(view, draft, self.length), state

    def observe(self, outcome: Outcome, state: PerRequest, now: float) -> PerRequest:
        rows = np.unique(np.concatenate([outcome.rows.request, outcome.free.request]))
        figures = state.of(rows)
        accepted, ended = self._judge(outcome, rows)
        length = max(self.length, 1)
        run = figures[:, _RUN] + accepted
        losses = np.where(ended > 0, ended, run // length)
        tokens = np.minimum(run / np.maximum(losses, 1), length)
        loss = np.where(losses > 0, 1 - (tokens + 1) / (length + 1), 0.0)
        figures[:, _RUN] = np.where(ended > 0, 0, run % length)
        figures[:, _LOSS] += loss * losses
        figures[:, _SEEN] += losses
        self._hedge(figures, loss, losses > 0)
        return state.with_figures(rows, figures, outcome.finished)

    def _judge(self, outcome: Outcome, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return by request and draft the accepted tokens and how many proposals ended, wrong."""
        accepted, ended = np.zeros((2, len(rows), len(self.drafts)))
        drafted, free = outcome.rows, outcome.free
        drafting = drafted.draft != NO_DRAFT
        columns = (
            drafted.request[drafting],
            drafted.draft[drafting],
            drafted.accepted[drafting],
            drafted.scored[drafting],
        )
        for request, draft, right, scored in (
            columns,
            (free.request, free.draft, free.accepted, free.scored),
        ):
            at = rows.searchsorted(request), draft
            np.add.at(accepted, at, np.minimum(right, scored))
            np.add.at(ended, at, right < scored)
        return accepted, ended

    @staticmethod
    def _hedge(figures: FloatArray, loss: FloatArray, judged: BoolArray) -> None:
        """Add what a round brings to the regrets, and set the weights."""
        has_loss = figures[:, _SEEN] > 0
        mean = figures[:, _LOSS] / np.maximum(figures[:, _SEEN], 1)
        loss = np.where(judged, loss, mean)
        weight = np.where(has_loss, figures[:, _WEIGHT], 0.0)
        weight = np.where(weight.sum(1, keepdims=True) > 0, weight, has_loss)
        total = np.maximum(weight.sum(1, keepdims=True), 1e-300)
        ours = (weight * loss).sum(1, keepdims=True) / total
        figures[:, _REGRET] += np.where(has_loss & judged.any(1, keepdims=True), ours - loss, 0.0)
        figures[:, _WEIGHT] = normal_hedge(figures[:, _REGRET])


ENTRIES = {
    "hedgespec": Baseline.by_path(
        HedgeSpec,
        "HedgeSpec",
        needs=("length",),
        colour="#9c3f3f",
        marker="d",
    ),
}
