"""What drafts show before they propose, in a simulated server."""

from __future__ import annotations

import numpy as np

from policy.plan import IntArray, Plan, StepRows, View
from policy.streaks import bins_of_streaks, streak_after

from .deployment import Deployment
from .workload import Workload


class Evidence:
    """What the drafts of a replica show: made up for those of which the deployment says how much it
    tells, and of others with a model how long they have been right about each request.
    """

    def __init__(self, deployment: Deployment, workload: Workload) -> None:
        drafts = len(deployment.drafts)
        self._showing = np.array(deployment.showing or (0.0,) * drafts)
        self._free = np.array(deployment.free, np.bool_)
        self._acceptance = workload.acceptance
        self._streak = np.full((len(workload), drafts), -1)  # -1: not known

    def shown(
        self, request: IntArray, position: IntArray, ceiling: IntArray, now: float
    ) -> IntArray:
        """Return the bins of drafts that can propose (``View.evidence``)."""
        bins = np.where(self._free, 0, bins_of_streaks(self._streak[request]))
        if self._showing.any():
            made_up = self._acceptance.shown(request, position, self._showing, now)
            bins = np.where(self._showing > 0, made_up, bins)
        return np.where(ceiling > 0, bins, 0)

    def take(self, rows: StepRows, decoding: int) -> None:
        """Take up what a step did for its first rows."""
        if not self._streak.size:
            return
        request, draft = rows.request[:decoding], rows.draft[:decoding]
        before = np.maximum(self._streak[request, draft], 0)
        counts = (column[:decoding] for column in (rows.accepted, rows.scored, rows.emitted))
        after = np.where(rows.length[:decoding] > 0, streak_after(before, *counts), -1)
        self._streak[request] = -1
        self._streak[request, draft] = after

    def forget(self, request: int) -> None:
        """Forget a request's streak."""
        self._streak[request] = -1


def of_plan(view: View, plan: Plan) -> IntArray:
    """Return what the planned drafts showed, int64[n]; 0 where none was planned."""
    if view.evidence is None or not view.drafts:
        return np.zeros(len(view), np.int64)
    return np.where(plan.draft >= 0, view.evidence[np.arange(len(view)), plan.draft], 0)
