"""What requests of one source have in common: a level between the request and the draft, learnt from finished requests of the group.

A group is whatever the caller names by a number: a client's tag, a hash of the prompt's first block. Its members deviate from the draft's
level by the group's deviation plus their own, both normal over the drafts (see ``policy.deviation``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .deviation import Law, posterior
from .plan import FloatArray

NO_GROUP = -1
_MEMORY_REQUESTS = 30.0  # of a group's own level, which drifts
WITHIN_SHARE = 0.5  # of the variance between requests: what is believed of members before any are seen


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """``known`` group -> (precision [D, D], pull [D]) of its deviation, the least recently used first; ``within`` the law of members."""

    known: dict[int, tuple[FloatArray, FloatArray]]
    within: Law

    @classmethod
    def none(cls, drafts: int, variance: float, requests: float) -> Groups:
        """Return what is known before any request."""
        return cls({}, Law.prior(drafts, WITHIN_SHARE * variance, requests))

    def expected(self, group: int, law: Law) -> tuple[FloatArray, FloatArray]:
        """Return mean [D] and covariance [D, D] of a new request's deviations, ``law`` being that of all requests."""
        if group not in self.known:
            return np.zeros(len(law.covariance)), law.covariance
        mean, doubt = self._level(group, law)
        return mean, doubt + self.within.covariance

    def learnt(self, group: int, law: Law, told: tuple[FloatArray, FloatArray], most_groups: int, most_requests: float) -> Groups:
        """Return the groups after a finished request of which the evidence ``told`` (weight [D], pull [D]) is left."""
        if group == NO_GROUP or not most_groups:
            return self
        weight, pull = told
        within, known, drafts = self.within, dict(self.known), len(weight)
        precision, pulls = known.pop(group, (np.zeros((drafts, drafts)), np.zeros(drafts)))
        if group in self.known:
            level, doubt = self._level(group, law)
            if np.trace(doubt) < np.trace(within.covariance):
                own, rest = posterior(within.covariance[None], weight[None], (pull - weight * level)[None], np.zeros((1, drafts)))
                within = within.learnt(own[0], rest[0], most_requests)
        keep = math.exp(-1 / _MEMORY_REQUESTS)
        seen = np.linalg.inv(np.eye(drafts) + weight[:, None] * self.within.covariance)  # by what members differ the evidence is weaker
        known[group] = keep * precision + seen @ np.diag(weight), keep * pulls + seen @ pull
        while len(known) > most_groups:
            del known[next(iter(known))]
        return Groups(known, within)

    def _level(self, group: int, law: Law) -> tuple[FloatArray, FloatArray]:
        """Return mean and covariance of a known group's deviation."""
        precision, pull = self.known[group]
        doubt: FloatArray = np.linalg.solve(np.eye(len(pull)) + law.covariance @ precision, law.covariance)
        return doubt @ pull, doubt
