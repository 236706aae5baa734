"""How far a draft's confidence in its paths is to be believed: what it claims of a node against the
share of such nodes whose whole path the target drew.

By draft, and apart for sampled and greedy rows, claims are counted in bins, finer towards 0 and 1.
A bin is shrunk towards the claim itself; between the bins' means the map is linear. It never falls
(isotonic regression), so that a row's best-first order stays what it is.

A node's fate may count only if it would have been known whatever the target drew: its parent is the
text or was verified. Of deeper nodes only failures are ever seen, and a draft that is cut short
once would be believed less and less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .plan import BoolArray, FloatArray, IntArray

EDGES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98],
)
"""Of the bins of confidence; each holds its lower edge."""

BINS = len(EDGES) + 1
COUNTS = ("nodes", "claimed", "held")
_BOUNDS = np.concatenate([[0.0], EDGES, [1.0]])
_MIDDLE = (_BOUNDS[:-1] + _BOUNDS[1:]) / 2
_PRIOR_NODES = 8.0  # for which a bin's claim is taken at its word
_MEMORY_NODES = 20_000.0  # of a draft's nodes, greedy or sampled: a few thousand row-steps
_APART = 2.0  # from one map to the next, which lie on one axis for a single look-up


class Reliability(NamedTuple):
    """A point of the reliability diagram: of ``nodes`` (fading) with ``claimed`` mean confidence
    the share ``held`` is what the target drew.
    """

    draft: int
    drawn: bool
    claimed: float
    held: float
    nodes: float


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Fading counts, float64[drafts, 2, BINS] each, by draft, whether tokens are drawn, and bin:
    ``nodes``, the sum ``claimed`` of their confidences, and how many ``held``; and the maps of all
    drafts one behind the other, ``held_at`` at confidence ``knots``.
    """

    nodes: FloatArray
    claimed: FloatArray
    held: FloatArray
    knots: FloatArray
    held_at: FloatArray

    @classmethod
    def of(cls, nodes: FloatArray, claimed: FloatArray, held: FloatArray) -> Calibration:
        """Return the calibration with these counts."""
        weight = nodes + _PRIOR_NODES
        mean = (claimed + _PRIOR_NODES * _MIDDLE) / weight
        share = _rising((held + _PRIOR_NODES * _MIDDLE) / weight, weight)
        knots, held_at = np.zeros((2, *nodes.shape[:2], BINS + 2))
        knots[..., 1:-1], held_at[..., 1:-1] = mean, share
        knots[..., -1] = 1.0
        held_at[..., -1] = np.minimum(share[..., -1] / mean[..., -1], 1.0)
        knots += _APART * np.arange(knots[..., 0].size).reshape(*nodes.shape[:2], 1)
        return cls(nodes, claimed, held, knots.ravel(), held_at.ravel())

    @classmethod
    def none(cls, drafts: int) -> Calibration:
        """Return what is known before any node: every claim is believed."""
        zero = np.zeros((drafts, 2, BINS))
        return cls.of(zero, zero, zero)

    @staticmethod
    def claims(nodes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the least and the most that so many nodes can claim, float64[..., BINS] each."""
        return nodes * _BOUNDS[:-1], nodes * _BOUNDS[1:]

    def probability(self, draft: IntArray, drawn: BoolArray, confidence: FloatArray) -> FloatArray:
        """Return how likely the paths to nodes are what the target draws, float64[q].

        The nodes are as in ``policy.plan.Drafted``.
        """
        place = confidence + _APART * (2 * draft + drawn)
        likely: FloatArray = np.interp(place, self.knots, self.held_at)
        return likely

    @staticmethod
    def bins(confidence: FloatArray) -> IntArray:
        """Return the bins of confidences, int64[q]."""
        return EDGES.searchsorted(confidence, side="right")

    def learnt(
        self,
        draft: IntArray,
        drawn: BoolArray,
        confidence: FloatArray,
        held: BoolArray,
    ) -> Calibration:
        """Return the calibration after nodes whose fate would be known whatever it is, [q] each."""
        if not len(draft):
            return self
        place = (2 * draft + drawn) * BINS + self.bins(confidence)
        size, shape = self.nodes.size, self.nodes.shape
        new = np.bincount(place, minlength=size).reshape(shape)
        keep = np.exp(new.sum(2, keepdims=True) / -_MEMORY_NODES)
        claimed = np.bincount(place, confidence, size).reshape(shape)
        true = np.bincount(place, held, size).reshape(shape)
        nodes = keep * self.nodes + new
        return Calibration.of(nodes, keep * self.claimed + claimed, keep * self.held + true)

    def reliability(self) -> list[Reliability]:
        """Return the points of which there is evidence, by draft, greedy before sampled."""
        points = []
        for place in zip(*self.nodes.nonzero(), strict=True):
            nodes, claimed, held = (getattr(self, name).item(place) for name in COUNTS)
            draft, drawn, _ = map(int, place)
            points.append(Reliability(draft, bool(drawn), claimed / nodes, held / nodes, nodes))
        return points


def _rising(share: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the shares made to rise along the last axis, in place; nearest in weighted squares.

    Neighbours that fall are pooled (pool adjacent violators, Ayer et al. 1955).
    """
    falls = (share[..., 1:] < share[..., :-1]).any(-1)
    for place in zip(*falls.nonzero(), strict=True):
        pools: list[tuple[float, float, int]] = []
        for mean, own in zip(share[place].tolist(), weight[place].tolist(), strict=True):
            pool, mass, bins = mean, own, 1
            while pools and pools[-1][0] >= pool:
                before, more, others = pools.pop()
                pool = (before * more + pool * mass) / (more + mass)
                mass, bins = mass + more, bins + others
            pools.append((pool, mass, bins))
        share[place] = [pool for pool, _, bins in pools for _ in range(bins)]
    return share
