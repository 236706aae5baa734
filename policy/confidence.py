"""How sure a draft was of its last token as a signal to go on drafting, in the form that leaves what is emitted as it is.

Token x_i is drafted and *kept*; what is decided is whether x_{i+1} is drafted at all, by q_1(x_1) .. q_i(x_i). Then whether a place is
verified never depends on the token drawn for it, and the rule of acceptance by min(1, p / q) stays exact. To discard x_i for its own low
q_i(x_i) is not: the place is then sampled from p alone whenever the draw was unlikely, and likely draws are emitted on top.

How sure is worth what is calibrated by counting: bins of confidence, and how often the next position held. Drafting goes on while the
next token is worth its time at the price: a threshold on the survival of the chain, the optimal form (SpecDec++, Huang et al. 2024).

Not wired into the planner yet: a draft would have to stop by itself, in the middle of its forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .plan import FloatArray, IntArray

_EDGES = np.array([0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
BINS = len(_EDGES) + 1


def bins(confidence: FloatArray) -> IntArray:
    """Return the bins, 0 .. ``BINS`` - 1, of the draft's probabilities of its own tokens; of any shape."""
    return np.searchsorted(_EDGES, confidence, side="right")


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """By bin of the confidence in the token before: positions ``accepted`` of those ``reached``, float64[BINS] each."""

    accepted: FloatArray = field(default_factory=lambda: np.zeros(BINS))
    reached: FloatArray = field(default_factory=lambda: np.zeros(BINS))

    def learnt(self, confidence: FloatArray, accepted: IntArray, scored: IntArray, keep: float = 1.0) -> Calibration:
        """Return the calibration after chains of which the first ``accepted[r]`` of ``scored[r]`` positions held (int64[m]).

        ``confidence`` float64[m, positions] is the draft's in each token. A position counts if it was reached, by the confidence in the
        one before it; the first has none before. What was counted earlier is kept by the factor ``keep``.
        """
        place = np.arange(1, confidence.shape[1])
        seen = place < np.minimum(accepted + 1, scored)[:, None]
        held = place < np.minimum(accepted, scored)[:, None]
        before = bins(confidence[:, :-1])
        counts = [np.bincount(before[which], minlength=BINS) for which in (held, seen)]
        return Calibration(keep * self.accepted + counts[0], keep * self.reached + counts[1])

    def hazard(self, level: float, strength: float = 10.0) -> FloatArray:
        """Return by bin the chance that the next position holds, float64[BINS]: Beta counts around ``level``, which counts ``strength``."""
        hazard: FloatArray = (self.accepted + strength * level) / (self.reached + strength)
        return hazard


def lengths(confidence: FloatArray, first: FloatArray, hazard: FloatArray, price: float, token_s: float) -> IntArray:
    """Return how many tokens a draft that stops by its confidence drafts in each row, int64[n].

    ``confidence`` float64[n, positions], ``first`` float64[n] the chance that the first token holds, ``hazard`` that of a later one by the
    bin of the one before. Token i + 1 is drafted if i was and the chance that all of i + 1 hold is above ``price`` (tokens per second)
    times ``token_s``, what drafting and verifying one costs. Whether it is depends on ``confidence[:, :i]`` alone.
    """
    likely = np.concatenate([first[:, None], hazard[bins(confidence[:, :-1])]], axis=1)
    drafted: IntArray = (np.cumprod(likely, axis=1) > price * token_s).sum(1)
    return drafted
