"""SmartSpec: the length of most goodput, for the whole batch.

Every 20 steps k = 0, 1, ... are scored by goodput V/T, and the scan stops at the first that is no
better; k = 0 counts for a tenth more. T is linear in tokens, rows and context. alpha is the rate
over the last 100 steps that speculated, at first 0.7, here by the unbiased estimate accepted /
(accepted + rejections). As in the published code, prefill in the step is not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from policy.latency import LatencyCurve, LatencyModel
from policy.plan import Outcome, Plan, Policy, View

from .entry import Baseline, same_for_all

_FIT_TOKENS = 512
_UPDATE_STEPS, _WINDOW_STEPS = 20, 100
_FIRST_WINDOW = ((7, 3),)
_LEAST_ALPHA, _MOST_ALPHA = 0.01, 0.99
_PLAIN_BONUS = 1.1  # of k = 0


def expected_tokens(alpha: float, length: int) -> float:
    """Return the tokens of a step of k proposals, each accepted with probability alpha < 1."""
    return float((1 - alpha ** (length + 1)) / (1 - alpha))


class SmartSpecState(NamedTuple):
    """k, since how many steps, and (accepted, rejected) of the last steps that speculated."""

    length: int = 0
    age: int = _UPDATE_STEPS
    window: tuple[tuple[int, int], ...] = ()


class SmartSpec(Policy[SmartSpecState]):
    """SmartSpec as its published code decides: one draft, one acceptance rate, one length."""

    def __init__(
        self, drafts: tuple[str, ...], draft: str, latency: LatencyModel, k_max: int = 8
    ) -> None:
        """Raise ValueError for an unknown draft."""
        if draft not in drafts:
            raise ValueError(f"draft must be one of {drafts}, got {draft!r}")
        self.draft, self._k_max = draft, k_max
        self._target = _line(latency.target)
        self._draft = _line(latency.drafts[drafts.index(draft)])
        self._overhead_s, self._speculation_s = latency.overhead_s, latency.speculation_s

    def start(self) -> SmartSpecState:
        return SmartSpecState()

    def plan(
        self, view: View, state: SmartSpecState, now: float, rng: Rng
    ) -> tuple[Plan, SmartSpecState]:
        if state.age >= _UPDATE_STEPS and len(view):
            rows, context = len(view), int(view.context.sum())
            accepted, rejected = map(sum, zip(*(state.window or _FIRST_WINDOW), strict=True))
            alpha = min(max(accepted / max(accepted + rejected, 1), _LEAST_ALPHA), _MOST_ALPHA)
            state = state._replace(length=self._best(rows, context, alpha), age=0)
        return same_for_all(view, self.draft, state.length), state._replace(age=state.age + 1)

    def observe(self, outcome: Outcome, state: SmartSpecState, now: float) -> SmartSpecState:
        rows = outcome.rows
        is_scored = rows.scored > 0
        if not is_scored.any():
            return state
        accepted = np.minimum(rows.accepted, rows.scored)[is_scored]
        step = (int(accepted.sum()), int((accepted < rows.scored[is_scored]).sum()))
        return state._replace(window=(*state.window[-(_WINDOW_STEPS - 1) :], step))

    def _best(self, rows: int, context: int, alpha: float) -> int:
        """Return the k before the first that is no better than the one before it."""
        best, best_goodput = 0, 0.0
        for k in range(self._k_max + 1):
            seconds = self._target.seconds(rows * (k + 1), rows, context) + self._overhead_s
            if k:
                seconds += k * self._draft.seconds(rows, rows, context) + self._speculation_s
            bonus = 1.0 if k else _PLAIN_BONUS
            goodput = rows * expected_tokens(alpha, k) / seconds * bonus
            if goodput <= best_goodput:
                break
            best, best_goodput = k, goodput
        return best


def _line(curve: LatencyCurve) -> LatencyCurve:
    """Return a straight line for a curve, as a regression over profiled steps would find it."""
    tokens = np.arange(1, _FIT_TOKENS + 1)
    slope_s, fixed_s = np.maximum(np.polyfit(tokens, curve.base(tokens), 1), 0.0)
    return LatencyCurve(np.array([fixed_s]), float(slope_s), curve.row_s, curve.context_s)


ENTRIES = {
    "smartspec": Baseline(
        lambda s: SmartSpec(s.drafts, s.draft, s.latency, s.k_max),
        "SmartSpec",
        needs=("draft",),
        colour="#2f6fb2",
        marker="D",
    ),
}
