"""The choice of a single request in plain numbers: a few dozen options are scored quicker without arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .goodput import TIE, Choice, Score
from .latency import FIRST_DRAFT, OVERHEAD, VERIFY, LatencyModel
from .plan import NO_DRAFT, View
from .problem import Bounds


class OneRow(NamedTuple):
    """The options of one row beside no speculation, one entry each, and by draft the catch-up seconds that are not charged to this step."""

    base_value: float
    plain_s: float
    draft: list[int]
    length: list[int]
    value: list[float]
    charged_s: list[float]
    uncharged_s: list[float]

    @property
    def rows(self) -> int:
        """Return 1."""
        return 1

    def best(self, price: float) -> tuple[Choice, Score, float]:
        """Return what ``optimiser.best_choice`` does."""
        plain = self.base_value - price * self.plain_s
        objective = [value - price * seconds for value, seconds in zip(self.value, self.charged_s, strict=True)]
        best = max(objective, default=plain)
        enough = best - TIE * (abs(best) + self.base_value + 1.0)
        if plain >= enough:
            return Choice(np.array([NO_DRAFT]), np.array([0])), Score(self.base_value, self.plain_s, self.plain_s), plain
        near = [i for i, o in enumerate(objective) if o >= enough]
        i = near[0] if len(near) == 1 else min(near, key=self.length.__getitem__)
        draft, charged_s = self.draft[i], self.charged_s[i]
        result = Score(self.value[i], charged_s, charged_s + self.uncharged_s[draft])
        return Choice(np.array([draft]), np.array([self.length[i]])), result, objective[i]


def one_row(latency: LatencyModel, correction: list[float], view: View, hazard: list[list[float]], bounds: Bounds) -> OneRow:
    """Return the options of a view of one ready row; ``hazard[drafts][positions]``. The same times as ``problem.step_problem``'s."""
    context, remaining, weight = view.context.item(), view.remaining.item(), view.weight.item()
    most = max(min(remaining - 1, bounds.k_max if view.headroom is None else min(bounds.k_max, view.headroom)), 0)
    target, tokens, scale = latency.target, view.prefill_tokens + 1, correction[VERIFY]
    fixed_s = correction[OVERHEAD] * latency.overhead_s + scale * (target.row_s + context * target.context_s)
    verify_s = [fixed_s + scale * s for s in target.run(tokens, most + 1).tolist()]
    limit_s = max(view.cap_s, verify_s[0]) * (1 + TIE)
    horizon = min(max(remaining / 2, 1.0), bounds.horizon_steps)
    speculation_s = correction[OVERHEAD] * latency.speculation_s
    places = zip(latency.drafts, correction[FIRST_DRAFT:], view.ceiling[0].tolist(), view.catchup[0].tolist(), strict=True)
    options = OneRow(weight, verify_s[0], [], [], [], [], [])
    drafts, lengths, values, charged, uncharged = options[2:]
    for d, (curve, scale, ceiling, catchup) in enumerate(places):
        first, unseen = min(max(catchup, 1), 2), max(catchup, 1)
        switch_s = scale * (curve.at(unseen) - curve.at(first)) if unseen > first else 0.0
        forward_s = curve.at(1)
        seconds = speculation_s + switch_s / horizon + (scale * (curve.at(first) - forward_s) if first > 1 else 0.0)
        token_s = scale * (forward_s + curve.row_s + curve.context_s * context)
        uncharged.append(switch_s - switch_s / horizon)
        survival, value, room = weight, weight, min(ceiling, most) if view.limit is None or view.limit[d] > 0 else 0
        for k, h in enumerate(hazard[d][:room], 1):
            survival *= h
            value += survival
            seconds += token_s
            charged_s = verify_s[k] + seconds
            if charged_s + uncharged[d] > limit_s < math.inf:
                break
            lengths.append(k)
            values.append(value)
            charged.append(charged_s)
        drafts += [d] * (len(lengths) - len(drafts))
    return options
