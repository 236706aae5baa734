"""Figures that a baseline keeps for each request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policy.plan import FloatArray, IntArray


class PerRequest(NamedTuple):
    """Figures of requests, in the order of the requests' ids."""

    request: IntArray  # [r]
    figures: FloatArray  # [r, ...]

    @classmethod
    def none(cls, *shape: int) -> PerRequest:
        """Return no requests yet, with figures of this shape each."""
        return cls(np.zeros(0, np.int64), np.zeros((0, *shape)))

    def of(self, request: IntArray) -> FloatArray:
        """Return the figures of requests, [n, ...]; zeros for one without any."""
        figures = np.zeros((len(request), *self.figures.shape[1:]))
        if len(self.request):
            place = np.minimum(self.request.searchsorted(request), len(self.request) - 1)
            matches = self.request[place] == request
            figures[matches] = self.figures[place[matches]]
        return figures

    def with_figures(
        self, request: IntArray, figures: FloatArray, finished: IntArray
    ) -> PerRequest:
        """Return these figures in place of those that the requests had, without finished ones."""
        others = ~np.isin(self.request, request)
        ids = np.concatenate([self.request[others], request])
        every = np.concatenate([self.figures[others], figures])
        stays = np.flatnonzero(~np.isin(ids, finished))
        order = stays[ids[stays].argsort()]
        return PerRequest(ids[order], every[order])
