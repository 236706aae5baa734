"""The drafts' levels: what all requests have shown of a draft, position by position."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .deviation import shifted
from .plan import FloatArray

_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_KEPT_AT_CHANGE = 0.1  # of a level's counts, where it changes at once


class Levels:
    """Makes hazards of a draft's counts; arrays are float64[drafts, positions]."""

    def __init__(self, prior_hazard: float, prior_strength: float) -> None:
        self._prior_hazard, self._strength = prior_hazard, prior_strength

    def hazards(self, accepted: FloatArray, reached: FloatArray) -> FloatArray:
        """Return the hazards of all drafts."""
        hazard = np.empty(accepted.shape)
        self.update(hazard, accepted, reached, range(len(accepted)))
        return hazard

    def update(
        self,
        hazard: FloatArray,
        accepted: FloatArray,
        reached: FloatArray,
        drafts: Iterable[int],
    ) -> None:
        """Make the hazards of some drafts anew, in place.

        Each position's prior is the estimate of the one before it.
        An unprobed position inherits the posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next succeeds
        with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the plug-in power of the mean would understate it.
        a + b is the evidence of all positions so far: what is well known is inherited as it is.
        """
        strength = self._strength
        for draft in drafts:
            inherited, evidence, chain = self._prior_hazard, strength, []
            # a few positions: quicker without arrays
            for a, r in zip(accepted[draft].tolist(), reached[draft].tolist(), strict=True):
                mean = (a + strength * inherited) / (r + strength)
                chain.append(_MIN_HAZARD if mean < _MIN_HAZARD else _MAX_HAZARD if mean > _MAX_HAZARD else mean)
                evidence += r
                inherited = (mean * evidence + 1) / (evidence + 1)
                evidence += 1
            hazard[draft] = chain

    def move(
        self,
        hazard: FloatArray,
        accepted: FloatArray,
        reached: FloatArray,
        change: FloatArray,
    ) -> None:
        """Move the levels by ``change`` [drafts] (logits), in place.

        What was counted there before hardly counts.
        """
        drafts = change.nonzero()[0]
        reached[drafts] *= _KEPT_AT_CHANGE
        accepted[drafts] = reached[drafts] * shifted(hazard[drafts], change[drafts])
        self.update(hazard, accepted, reached, drafts.tolist())
